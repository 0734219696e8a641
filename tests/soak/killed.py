"""How long a consumer waits for a producer that is killed, with default settings.

``python -m tests.soak.killed [--times 5]`` starts a producer for each try, kills it
with half of a transfer under way, and prints the time until the consumer's outcome, its
reason, and until its memory is free: over tcp and local, pulled and pushed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time

import numpy as np

import kvwire
from tests.support.tree import ROOT

SPEC = kvwire.KVSpec(
    layers=8, kv_heads=2, head_dim=64, block_tokens=16, dtype="float32"
)
BLOCKS = list(range(8))


def cache() -> kvwire.PagedCache:
    """A cache of a few blocks."""
    return kvwire.PagedCache(
        SPEC, [np.zeros((8, 2, 16, 2, 64), np.float32) for _ in range(SPEC.layers)]
    )


async def produce(transport: str, verb: str, address: str) -> None:
    """Send half of a transfer, and wait to be killed."""
    async with kvwire.open(name="producer", prefer=[transport]) as comm:
        if verb == "pull":
            print(await comm.listen("127.0.0.1:0"), flush=True)
            out = comm.publish("t", cache(), BLOCKS)
        else:
            out = (await comm.connect(address)).push("t", cache(), BLOCKS)
        out.ready(layers=slice(0, 4))
        await out


async def once(transport: str, verb: str) -> None:
    """Kill one producer, and say how that ends."""
    config = kvwire.Config(name="consumer", prefer=(transport,))
    async with kvwire.open(config) as comm:
        address = "-" if verb == "pull" else str(await comm.listen("127.0.0.1:0"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __spec__.name, "--produce", transport),
            *(verb, address),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        if verb == "pull":
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().strip()
            connection = await comm.connect(address)
            inc = connection.pull("t", cache(), BLOCKS)
        else:
            inc = comm.expect("t", cache(), BLOCKS)
            connection = await comm.accept()
        await inc.layer(3)
        taken, killed = connection.transport, time.monotonic()
        process.send_signal(signal.SIGKILL)
        outcome = await inc
        known_s = time.monotonic() - killed
        await inc.drained()
        free_s = time.monotonic() - killed
        await process.wait()
        why = next(iter(outcome.missing.reasons), "")
        print(f"{taken:6} {verb:5} outcome {known_s:.3f} s, free {free_s:.3f} s: {why}")


async def every(times: int) -> None:
    """Try each way in turn."""
    for _ in range(times):
        for transport in ("tcp", "local"):
            for verb in ("pull", "push"):
                await once(transport, verb)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.killed")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--produce", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.produce:
        asyncio.run(produce(*given.produce))
    else:
        asyncio.run(every(given.times))


if __name__ == "__main__":
    main()
