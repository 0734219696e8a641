"""Who stands beside each tier of ``kvwire bench store``.

What is left of the same work without a store: a copy, a file, a transfer, a socket,
objects, redis. Nobody of those has hashes, an index, eviction, scattered blocks or, but
for the transfer, checksums; so the ratio is what that costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvwire.cli.bench import store as stores
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.side import Program
from kvwire.cli.bench.turns import Benchmark, Case
from tests.programs.bench import redis
from tests.programs.bench.store_pairs import sockets, transfers
from tests.programs.bench.store_peers import files, memory, objects

NOTES = (
    "Of the others only a transfer has checksums, and blocks that lie scattered.",
    "file: pwrite and preadv of 16 MiB at once.",
    "redis: SET and GET in a row over loopback, a value for each block.",
)


def beside(benchmark: Benchmark) -> Benchmark:
    """Have everybody take part who is installed here."""
    absent = redis.missing()

    @cache
    def made(
        name: str, program: Program, alone: bool = True, **options: Any
    ) -> Contender:
        return Contender(name, program, alone=alone, options=options)

    def peers(case: Case) -> Sequence[Contender]:
        ours, match = case.ours[0].options, case.work.verb in stores.MATCHES
        memcpy, place = made("memcpy", memory), Path(str(ours["place"]))
        if case.group == stores.MEMORY:
            return [made("dict", memory) if match else memcpy]
        if case.group == stores.DISK:
            file = made("file", files, place=str(place.parent))
            # A copy has nothing to flush, and never finds anything cold.
            copies = case.work.verb not in (stores.FLUSHED_PUT, stores.COLD_GET)
            return [] if match else [*[memcpy] * copies, file]
        if case.group == stores.OBJECT:
            return [made("obstore", objects, place=str(place.parent / "bare"))]
        transport = case.group.rpartition(" ")[2]
        transfer = made(
            f"transfer {transport}",
            transfers,
            alone=False,
            transport=transport,
            loop=ours["loop"],
        )
        servers = [made("sockets", sockets, alone=False)]
        servers += [made("redis", redis.blocks)] * (absent is None)
        return servers if match else [transfer, *servers]

    cases = [
        replace(case, beside=[*case.beside, *peers(case)]) for case in benchmark.cases
    ]
    served = any(case.group.startswith("server") for case in cases)
    return replace(
        benchmark,
        cases=cases,
        missing=[*benchmark.missing, *([absent] if absent and served else [])],
        notes=[*benchmark.notes, *NOTES],
    )
