"""The rows of each tier of a store, and who is beside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvwire import UsageError
from kvwire.extras import install_command
from kvwire.types import in_bytes
from kvwire_certify.bench.line import Program
from kvwire_certify.bench.pair import Contender
from kvwire_certify.bench.turns import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Missing,
)
from packages.certify.tests.bench import redis, store_pairs, store_peers
from packages.certify.tests.bench.store import (
    COLD_GET,
    DISK,
    FLUSHED_PUT,
    MATCHES,
    MEMORY,
    OBJECT,
    ONE,
    SERVER,
    TIERS,
    can_drop,
    server,
    store,
    work_of,
)

NOTES = (
    "Every byte of every get is compared with the put.",
    "Of the others only a transfer has checksums, and blocks that lie scattered.",
    "file: pwrite and preadv of 16 MiB at once.",
    "redis: SET and GET in a row over loopback, a value for each block.",
)


def benchmark(
    tiers: Sequence[str],
    transports: Sequence[str],
    shapes: Sequence[str],
    place: Path,
    round_bytes: int,
) -> Benchmark:
    """Make the benchmark: each tier's rows, by shape, then its matches."""
    if unknown := set(tiers) - {*TIERS}:
        raise UsageError(f"--tiers {unknown}: choose from {', '.join(TIERS)}")
    absent = redis.missing()
    missing = [absent] if absent and SERVER in tiers else []
    if OBJECT in tiers and find_spec("obstore") is None:
        missing.append(Missing("the object tier", install_command("store")))
        tiers = [tier for tier in tiers if tier != OBJECT]
    cold = DISK in tiers and can_drop(place)

    # Everybody has processes once, whatever they stand beside.
    @cache
    def made(name: str, left: Program, right: Program | None = None) -> Contender:
        options = {"place": str(place / name), "transport": name.rpartition(" ")[2]}
        Path(options["place"]).mkdir()
        return Contender(name, left, right, options=options)

    @cache
    def ours(tier: str, transport: str) -> Contender:
        return Contender(
            f"kvwire {tier} {transport}".rstrip(),
            store,
            server if tier == SERVER else None,
            # The only path that both processes may use.
            environment={"KVWIRE_REQUIRE": transport} if transport else {},
            options={"tier": tier, "place": str(place / "kv" / tier)},
        )

    def beside(tier: str, transport: str, verb: str) -> list[Contender]:
        match, memcpy = verb in MATCHES, made("memcpy", store_peers.memory)
        if tier == MEMORY:
            return [] if match else [memcpy]
        if tier == DISK:
            # A copy has nothing to flush, and never finds anything cold.
            copies = verb not in (FLUSHED_PUT, COLD_GET)
            file = made("file", store_peers.files)
            return [] if match else [*[memcpy] * copies, file]
        if tier == OBJECT:
            return [made("obstore", store_peers.objects)]
        transfer = store_pairs.transfer_left, store_pairs.transfer_right
        found = [] if match else [made(f"transfer {transport}", *transfer)]
        return found + ([] if absent else [made("redis", redis.blocks)])

    def case(tier: str, transport: str, verb: str, shape: str) -> Case:
        work = work_of(verb, shape, round_bytes)
        timed: Any = verb in (ONE, *MATCHES)
        return Case(
            name=f"{in_bytes(work.nbytes)} {verb}",
            work=work,
            unit=MICROSECONDS if timed else GIGABYTES_PER_SECOND,
            ours=[ours(tier, transport)],
            beside=beside(tier, transport, verb),
            tail=timed,
            group=f"{tier} over {transport}" if transport else tier,
        )

    cases = [
        case(tier, transport, verb, shape)
        for tier in tiers
        for transport in (transports if tier == SERVER else ("",))
        for verb, shape in _rows(tier, shapes)
        if verb != COLD_GET or cold
    ]
    return Benchmark(name="store", cases=cases, missing=missing, notes=NOTES)


def _rows(tier: str, shapes: Sequence[str]) -> list[tuple[str, str]]:
    rows = [(verb, shape) for shape in shapes for verb in TIERS[tier]]
    return rows + [(verb, shapes[0]) for verb in MATCHES if tier != OBJECT]
