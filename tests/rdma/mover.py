"""Two hosts that move blocks, and check each byte: a program for each.

    python -m tests.rdma.mover serve --count 20
    python -m tests.rdma.mover pull --count 20 --from 192.168.78.1

Each block names its transfer and its place. Before a pull the memory is filled with
another value, and after `drained` again, so that a late write is found at the next use.
`pull` prints a line of JSON for each transfer and one for all, and ends with status 1
if any byte was wrong.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

import kvwire

PORT = 7400
CANARY = 0x7B7B7B7B
# Both ends of a wire that belongs to the test alone.
KEY = "5b" * 32


def _cache(options: argparse.Namespace) -> tuple[kvwire.PagedCache, npt.NDArray[Any]]:
    heads = options.fragment_bytes // (2 * 16 * 64 * 4)
    spec = kvwire.KVSpec(
        layers=options.layers,
        kv_heads=max(heads, 1),
        head_dim=64,
        block_tokens=16,
        dtype="float32",
    )
    shape = (options.layers, options.blocks, 2, 16, spec.kv_heads, 64)
    words = np.full(shape, CANARY, np.uint32)
    tensors = [layer.view(np.float32) for layer in words]
    return kvwire.PagedCache(spec, tensors, layout="NHD"), words.reshape(
        options.layers, options.blocks, -1
    )


def _expected(number: int, words: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """What a transfer moves: each word names its layer and block, and the transfer."""
    layers, blocks, _ = words.shape
    place = np.arange(layers * blocks, dtype=np.uint32).reshape(layers, blocks, 1)
    return np.uint32(0x0100_0000) + np.uint32(number << 12) + place


def _config(options: argparse.Namespace) -> kvwire.Config:
    with open(options.key, "w", opener=_private) as file:
        file.write(KEY)
    return kvwire.Config.load(
        trust="psk",
        psk_file=options.key,
        require=(options.transport,) if options.require else (),
        prefer=(options.transport,),
        handshake_timeout_s=60.0,
        ping_interval_s=options.ping_s,
        one_sided_windows="peers",
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


async def serve(options: argparse.Namespace) -> NoReturn:
    cache, words = _cache(options)
    async with kvwire.open(_config(options), name="owner") as comm:
        await comm.listen(f"0.0.0.0:{PORT}")
        print("listening", flush=True)
        for number in range(options.count):
            words[:] = _expected(number, words)
            out = comm.publish(
                str(number), cache, range(options.blocks), deadline=options.life_s
            )
            for layer in range(options.layers):
                out.ready(layers=layer)
            out.finish()
            outcome = await out
            await out.drained()
            words[:] = CANARY
            print(number, outcome.complete, flush=True)
        await asyncio.Event().wait()  # until it is killed
    raise AssertionError


async def pull(options: argparse.Namespace) -> int:
    cache, words = _cache(options)
    ends: Counter[str] = Counter()
    wrong = late = 0
    began = time.monotonic()
    async with kvwire.open(_config(options), name="reader") as comm:
        peer = comm.peer(f"{options.owner}:{PORT}")
        for number in range(options.count):
            late += int((words != CANARY).sum())
            words[:] = CANARY
            incoming = peer.pull(
                str(number), cache, range(options.blocks), deadline=options.life_s
            )
            outcome = await incoming
            landed = outcome.landed.ids()
            expected = _expected(number, words)
            bad = int((words[:, landed] != expected[:, landed]).any(axis=-1).sum())
            wrong += bad
            ends["complete" if outcome.complete else "partial"] += 1
            await incoming.drained()
            words[:] = CANARY
            line = {
                "transfer": number,
                "landed": len(landed),
                "wrong": bad,
                "way": str(peer.connection.transport_report) if peer.connection else "",
            }
            print(json.dumps(line), flush=True)
    summary = {
        **ends,
        "wrong": wrong,
        "late": late,
        "seconds": round(time.monotonic() - began, 2),
        "bytes": int(words.nbytes) * ends["complete"],
    }
    print("summary " + json.dumps(summary), flush=True)
    return 1 if wrong or late else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["serve", "pull"])
    parser.add_argument("--from", dest="owner", default="192.168.78.1")
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--require", action="store_true")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--fragment-bytes", type=int, default=65536)
    parser.add_argument("--life-s", type=float, default=120.0)
    parser.add_argument("--ping-s", type=float, default=10.0)
    parser.add_argument("--key", default="/run/rdma.key")
    options = parser.parse_args()
    return asyncio.run((serve if options.role == "serve" else pull)(options))


if __name__ == "__main__":
    sys.exit(main())
