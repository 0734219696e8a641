"""Two hosts that move blocks, and check each byte: a program for each.

    python -m tests.rdma.mover serve --count 20
    python -m tests.rdma.mover pull --count 20

Each block names its transfer and its place. Before a pull the memory is filled with
another value, and after `drained` again, so that a late write is found at the next use;
the owner's memory too, so that a late read shows in what the reader has. Each prints a
line of JSON for each transfer, and `pull` one for all as well; it ends with status 1 if
any byte was wrong. With `--require` nothing but `ucx` may carry the data. With `--hold`
the reader says when it has the first half of the layers, and the owner waits for
SIGUSR1 with the second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvwire
from tests.rdma.hosts import FIRST

PORT: Final = 7400
# 64 KiB are one layer of a block: read where they lie, rather than packed.
SPEC: Final = kvwire.KVSpec(
    layers=4, kv_heads=8, head_dim=64, block_tokens=16, dtype="float32"
)
HALF: Final = SPEC.layers // 2
CANARY: Final = 0x7B7B7B7B
# A guest is slow, and a loaded machine makes it slower.
DEADLINE_S: Final = 120.0
# Both ends are on a wire that belongs to the test alone.
KEY_FILE: Final = "/run/rdma.key"
KEY: Final = "5b" * 32

Words = npt.NDArray[Any]


def _cache(blocks: int) -> tuple[kvwire.PagedCache, Words]:
    """A cache, and its memory as words by layer and block."""
    shape = (SPEC.layers, blocks, 2, 16, SPEC.kv_heads, SPEC.head_dim)
    words = np.full(shape, CANARY, np.uint32)
    tensors = [layer.view(np.float32) for layer in words]
    return kvwire.PagedCache(SPEC, tensors, layout="NHD"), words.reshape(
        SPEC.layers, blocks, -1
    )


def _expected(number: int, blocks: int) -> Words:
    """What a transfer moves: each word names its layer and block, and the transfer."""
    place = np.arange(SPEC.layers * blocks, dtype=np.uint32)
    seed = np.uint32(0x0100_0000) + np.uint32(number << 14)
    return seed + place.reshape(SPEC.layers, blocks, 1)


def config(options: argparse.Namespace) -> kvwire.Config:
    """Return the configuration of either end."""
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
        ping_interval_s=5.0,
        lease_s=options.deadline,
        one_sided_windows="peers",
    )


def _print(number: int, outcome: kvwire.Outcome, **more: object) -> None:
    line = {
        "transfer": number,
        "state": outcome.state,
        "why": next(iter(outcome.missing.values()), ""),
        **more,
    }
    print(json.dumps(line), flush=True)


async def serve(options: argparse.Namespace) -> int:
    """Publish one transfer after the other, from memory filled anew for each."""
    cache, words = _cache(options.blocks)
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    go_on = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, go_on.set)
    async with kvwire.open(config(options), name="owner") as comm:
        await comm.listen(f"0.0.0.0:{PORT}")
        print("listening", flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            for number in range(options.start, options.start + options.count):
                words[:] = _expected(number, options.blocks)
                out = comm.publish(
                    str(number), cache, range(options.blocks), deadline=options.deadline
                )
                out.ready(layers=slice(0, HALF))
                if options.hold:
                    await go_on.wait()
                    go_on.clear()
                out.ready(layers=slice(HALF, SPEC.layers))
                out.finish()
                outcome = await out
                await out.drained()
                words[:] = CANARY
                _print(number, outcome)
            await asyncio.Event().wait()
    print("closed", flush=True)
    return 0


async def pull(options: argparse.Namespace) -> int:
    """Pull them, and compare each word."""
    blocks = options.blocks
    cache, words = _cache(blocks)
    ends: Counter[str] = Counter()
    wrong = late = 0
    began = time.monotonic()
    async with kvwire.open(config(options), name="reader") as comm:
        peer = comm.peer(f"{options.at}:{PORT}")
        for number in range(options.start, options.start + options.count):
            incoming = peer.pull(
                str(number), cache, range(blocks), deadline=options.deadline
            )
            if options.hold:
                with contextlib.suppress(kvwire.RequestError):  # the outcome has it
                    await incoming.layer(HALF - 1)
                    print(f"half of {number}", flush=True)
            outcome = await incoming
            landed = outcome.landed.ids()
            differs = words[:, landed] != _expected(number, blocks)[:, landed]
            bad = int(differs.any(axis=-1).sum())
            wrong += bad
            ends[outcome.state] += 1
            await incoming.drained()
            words[:] = CANARY
            way = str(peer.connection.transport_report) if peer.connection else ""
            _print(number, outcome, landed=len(landed), wrong=bad, way=way)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.watch):
                    await asyncio.Event().wait()  # nothing may happen meanwhile
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
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="the first one's number")
    parser.add_argument("--blocks", type=int, default=16, help="of 256 KiB")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S)
    parser.add_argument("--watch", type=float, default=0.0, help="s after each one")
    parser.add_argument("--at", default=FIRST, help="the owner's address")
    parser.add_argument("--require", action="store_true")
    parser.add_argument("--hold", action="store_true")
    options = parser.parse_args()
    return asyncio.run((serve if options.role == "serve" else pull)(options))


if __name__ == "__main__":
    sys.exit(main())
