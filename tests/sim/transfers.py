"""Several KV transfers over several links, in virtual time.

``tests.sim`` drives the core on single links. Here whole communicators live on the
in-process backend, whose links lose, delay, repeat and damage frames, stall and end,
while connections are cut, dialled again and transfers resumed. What decides is the seed
alone. The oracles are those of the soak: stamped lines, poison behind ``drained``, and
what a producer claims.

    python -m tests.sim.transfers --seeds 1000 [--start 0]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple
from unittest import mock

from rich.progress import track

import kvwire
from kvwire_inproc import FaultPlan, injected
from tests.soak.one_process import Soak
from tests.support import virtual_time

# A layer of a block is 16 KiB, and of a transfer some chunks of 64 KiB: a cut leaves a
# part of one. A seed takes a quarter of a second.
_SPEC: Final = kvwire.KVSpec(
    layers=3, kv_heads=4, head_dim=64, block_tokens=16, dtype="float16"
)
# Some rounds of four transfers.
_GOAL_BYTES: Final = 4 * 1024 * 1024
# More than the frames of either side's handshake, so that there is a connection.
_SPARE: Final = 6


class Life(NamedTuple):
    """What a seed came to.

    Attributes:
        failed: Why, or "": a byte was wrong or late, a producer claimed too much, or
            something hung or raised.
        ended_at: The virtual time of the end, in seconds.
        counts: How often what happened.
    """

    failed: str
    ended_at: float
    counts: dict[str, int]


def run_seed(seed: int) -> Life:
    """Run one seed."""
    draw = random.Random(seed)
    random.seed(seed)  # of the pauses between redials
    soak = Soak(
        seed=seed,
        goal_bytes=_GOAL_BYTES,
        drop_s=draw.choice((0.0, 0.002, 0.02, 0.2)),
        listen="inproc://transfers",
        spec=_SPEC,
        # A segment is several chunks, and can land in part.
        chunk_bytes=65_536,
    )

    async def main() -> float:
        await soak.run()
        return asyncio.get_running_loop().time() - virtual_time.START_S

    failed, ended_at = "", 0.0
    try:
        # Names of processes and nonces too, so that frames are what they were.
        named = random.Random(seed)
        drawn = mock.patch("secrets.token_bytes", named.randbytes)
        with drawn, injected(_faults(draw)):
            ended_at = virtual_time.run(main())
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is the seed's result
        failed = repr(exc)
    tally = soak.tally
    if tally.failed:
        failed = (
            f"{tally.wrong_bytes} wrong bytes, {tally.late_bytes} late bytes, "
            f"{tally.false_reports} false reports"
        )
    return Life(failed, ended_at, dict(tally.counts))


def _faults(draw: random.Random) -> FaultPlan:
    """Each kind rare enough that frames get through, or absent."""

    def chance(*of: float) -> float:
        return draw.choice((0.0, *of))

    return FaultPlan(
        seed=draw.randrange(2**32),
        drop=chance(0.0, 0.005),
        delay=chance(0.01, 0.1),
        reorder=chance(0.0, 0.005),
        duplicate=chance(0.0, 0.005),
        corrupt=chance(0.005, 0.02),
        stall=chance(0.0, 0.002),
        kill=chance(0.002, 0.01),
        delay_s=draw.choice((0.001, 0.05)),
        stall_after=_SPARE,
        kill_after=_SPARE,
        spare=_SPARE,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds; 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.transfers")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    given = parser.parse_args(arguments)
    logging.getLogger("kvwire").setLevel(logging.CRITICAL)
    seeds = range(given.start, given.start + given.seeds)
    total: dict[str, int] = {}
    failed = []
    for seed in track(seeds, "transfers"):
        life = run_seed(seed)
        if life.failed:
            failed.append(seed)
            print(f"seed {seed}: {life.failed}")
        for what, count in life.counts.items():
            total[what] = total.get(what, 0) + count
    print(f"{len(seeds)} seeds, {len(failed)} failed {failed[:10]}")
    for what, count in sorted(total.items()):
        print(f"  {what}: {count}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
