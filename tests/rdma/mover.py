"""Two hosts that move blocks, and check each byte: a program for each.

    python -m tests.rdma.mover serve --count 20
    python -m tests.rdma.mover pull --count 20

Each block names its transfer and its place. Before a pull the memory is filled with
another value, and after `drained` again, so that a late write is found at the next use.
`pull` prints a line of JSON for each transfer and one for all, and ends with status 1
if any byte was wrong. With `--require` nothing but `ucx` may carry the data.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

import kvwire
from tests.rdma.hosts import FIRST

PORT: Final = 7400
BLOCKS: Final = range(16)
# 64 KiB are one layer of a block: read where they lie, rather than packed.
SPEC: Final = kvwire.KVSpec(
    layers=4, kv_heads=8, head_dim=64, block_tokens=16, dtype="float32"
)
SHAPE: Final = (SPEC.layers, len(BLOCKS), 2, 16, SPEC.kv_heads, 64)
CANARY: Final = 0x7B7B7B7B
# A guest is slow, and a loaded machine makes it slower.
DEADLINE_S: Final = 120.0
# Both ends are on a wire that belongs to the test alone.
KEY_FILE: Final = "/run/rdma.key"
KEY: Final = "5b" * 32

Words = npt.NDArray[Any]


def _cache() -> tuple[kvwire.PagedCache, Words]:
    """A cache, and its memory as words by layer and block."""
    words = np.full(SHAPE, CANARY, np.uint32)
    tensors = [layer.view(np.float32) for layer in words]
    flat = words.reshape(SPEC.layers, len(BLOCKS), -1)
    return kvwire.PagedCache(SPEC, tensors, layout="NHD"), flat


def _expected(number: int) -> Words:
    """What a transfer moves: each word names its layer and block, and the transfer."""
    count = SPEC.layers * len(BLOCKS)
    place = np.arange(count, dtype=np.uint32).reshape(SPEC.layers, len(BLOCKS), 1)
    return np.uint32(0x0100_0000) + np.uint32(number << 12) + place


def _config(options: argparse.Namespace) -> kvwire.Config:
    with open(
        KEY_FILE, "w", opener=lambda path, flags: os.open(path, flags, 0o600)
    ) as f:
        f.write(KEY)
    return kvwire.Config.load(
        trust="psk",
        psk_file=KEY_FILE,
        require=("ucx",) if options.require else (),
        prefer=("ucx",),
        handshake_timeout_s=60.0,
        ping_interval_s=10.0,
    )


async def serve(options: argparse.Namespace) -> NoReturn:
    """Publish one transfer after the other, from memory filled anew for each."""
    cache, words = _cache()
    async with kvwire.open(_config(options), name="owner") as comm:
        await comm.listen(f"0.0.0.0:{PORT}")
        print("listening", flush=True)
        for number in range(options.count):
            words[:] = _expected(number)
            out = comm.publish(str(number), cache, BLOCKS, deadline=DEADLINE_S)
            for layer in range(SPEC.layers):
                out.ready(layers=layer)
            out.finish()
            outcome = await out
            await out.drained()
            words[:] = CANARY
            print(number, outcome.complete, flush=True)
        await asyncio.Event().wait()  # until it is killed
    raise AssertionError


async def pull(options: argparse.Namespace) -> int:
    """Pull them, and compare each word."""
    cache, words = _cache()
    ends: Counter[str] = Counter()
    wrong = late = 0
    began = time.monotonic()
    async with kvwire.open(_config(options), name="reader") as comm:
        peer = comm.peer(f"{FIRST}:{PORT}")
        for number in range(options.count):
            incoming = peer.pull(str(number), cache, BLOCKS, deadline=DEADLINE_S)
            outcome = await incoming
            landed = outcome.landed.ids()
            differs = words[:, landed] != _expected(number)[:, landed]
            bad = int(differs.any(axis=-1).sum())
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
            late += int((words != CANARY).sum())
    late += int((words != CANARY).sum())  # the communicator is closed
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
    """Be one of the two ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["serve", "pull"])
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--require", action="store_true")
    options = parser.parse_args()
    return asyncio.run((serve if options.role == "serve" else pull)(options))


if __name__ == "__main__":
    sys.exit(main())
