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

from kvwire.cli.bench import store_side
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.turns import Benchmark, Case
from tests.programs.bench import redis
from tests.programs.bench.store_pairs import BlockSocketsSide, TransferSide
from tests.programs.bench.store_peers import FileSide, MemorySide, ObjectSide

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
        name: str, role: type[Any], alone: bool = True, **options: Any
    ) -> Contender:
        return Contender(name, role, alone=alone, options=options)

    def peers(case: Case) -> Sequence[Contender]:
        ours, match = case.ours[0].options, case.work.verb == store_side.MATCH
        memcpy, place = made("memcpy", MemorySide), Path(str(ours["place"]))
        if case.group == store_side.MEMORY:
            return [made("dict", MemorySide) if match else memcpy]
        if case.group == store_side.DISK:
            file = made("file", FileSide, place=place.parent)
            # A copy has nothing to flush, and never finds anything cold.
            copies = case.work.verb not in (store_side.FLUSHED_PUT, store_side.COLD_GET)
            return [] if match else [*[memcpy] * copies, file]
        if case.group == store_side.OBJECT:
            return [made("obstore", ObjectSide, place=place.parent / "bare")]
        transport = case.group.rpartition(" ")[2]
        transfer = made(
            f"transfer {transport}",
            TransferSide,
            alone=False,
            transport=transport,
            loop=ours["loop"],
        )
        servers = [made("sockets", BlockSocketsSide, alone=False)]
        servers += [made("redis", redis.RedisSide)] * (absent is None)
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
