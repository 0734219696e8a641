"""The ``kvwire bench`` command line, and the cases of each benchmark."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

import kvwire
from kvwire.backend import registry
from kvwire.limits import KIB, MIB
from kvwire.types import MemoryKind, in_bytes
from kvwire_certify.bench import bare, hosts, sides
from kvwire_certify.bench.pair import Contender, placements
from kvwire_certify.bench.report import (
    document,
    load_note,
    progress_bar,
    render,
    show,
)
from kvwire_certify.bench.turns import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Findings,
    Missing,
    steps,
    take_turns,
)
from kvwire_certify.bench.work import (
    ARENA,
    CONNECT,
    GET,
    PULL,
    PUSH,
    PUT,
    READY,
    ROUND_TRIP,
    SEND,
    Work,
)

app: App = App(
    name="bench", help="Measure transports on this machine, or between two hosts."
)


def within(low: int, high: int, *, consume_multiple: bool = False) -> Parameter:
    """Return an option's parameter: a number from ``low`` to ``high``."""
    limits = Number(gte=low, lte=high)
    return Parameter(validator=limits, consume_multiple=consume_multiple)


Mebibytes = Annotated[int, within(1, 4096)]
Kibibytes = Annotated[tuple[int, ...], within(4, 16_384, consume_multiple=True)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Options that every benchmark has.

    Attributes:
        rounds: The number of rounds; more rounds give firmer medians.
        placement: Both processes on one CPU, on two, or once each. A machine with one
            CPU has only the first.
        loop: The event loop of kvwire, and of bare streams beside it.
        json: Write every sample, with versions, settings and load, to this file; -
            means standard output.
        listen: Measure nothing, and be the other side for another host, which runs the
            same command with `--peer` and this address.
        peer: Measure between this host and the host at this address, which runs the
            same command with `--listen`. Then only kvwire takes part.
    """

    rounds: Annotated[int, within(1, 10_000)] = 5
    placement: Literal["both", "same", "apart"] = "both"
    loop: Literal["uvloop", "asyncio"] = "uvloop"
    # "-" is a file name here, not an option.
    json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None
    listen: str = ""
    peer: str = ""


COMMON: Final = Common()


def measure(benchmark: Benchmark, common: Common, **settings: Any) -> Findings:
    """Run a benchmark and show the results; the settings are for the document."""
    if common.peer:
        benchmark = _with_peer(benchmark, common, _profile(benchmark, settings))
    else:
        benchmark = _placed(benchmark, common.placement)
    benchmark = replace(
        benchmark, notes=[load_note(os.getloadavg()[0]), *benchmark.notes]
    )
    with progress_bar(steps(benchmark, common.rounds)) as progress:
        found = take_turns(benchmark, common.rounds, progress)
    given = {k: v for k, v in asdict(common).items() if k != "json"}
    show(
        render(benchmark, found),
        lambda: document(benchmark, found, {**settings, **given}),
        json=common.json,
    )
    return found


def _run(benchmark: Benchmark, common: Common, **settings: Any) -> int:
    """Return 1 if kvwire failed."""
    if common.listen and common.peer:
        raise kvwire.UsageError("--peer and --listen: pass one of them")
    for address in filter(None, (common.listen, common.peer)):
        kvwire.Address.parse(address)
    if common.listen:
        profile = _profile(benchmark, settings)
        asyncio.run(hosts.serve(common.listen, _works(benchmark), profile))
        return 0
    found = measure(benchmark, common, **settings)
    return int(any(one.name in row.failures for row in found for one in row.case.ours))


def _placed(benchmark: Benchmark, placement: str) -> Benchmark:
    """Repeat all cases for each place of the two processes."""
    every = [*placements().items()]
    same, *apart = every
    chosen = {"both": every, "same": [same], "apart": apart}[placement]
    if not chosen:
        raise kvwire.UsageError("--placement apart: this process may use one CPU only")
    cases = [
        replace(case, placement=name, cpus=cpus)
        for name, cpus in chosen
        for case in benchmark.cases
    ]
    return replace(benchmark, cases=cases)


def _with_peer(benchmark: Benchmark, common: Common, profile: str) -> Benchmark:
    """Have the right sides on another host; its and this environment choose for UCX."""
    works = _works(benchmark)
    transports = [
        str(one.options["transport"]) for case in benchmark.cases for one in case.ours
    ]
    options = {
        "address": common.peer,
        "loop": common.loop,
        "works": [asdict(work) for work in works],
        "profile": profile,
    }
    ours = [
        Contender(f"kvwire {name}", hosts.left, options={**options, "transport": name})
        for name in dict.fromkeys(transports)
    ]
    first = {case.work: case for case in reversed(benchmark.cases)}
    cases = [
        replace(first[work], ours=ours, beside=(), group=f"to {common.peer}")
        for work in works
    ]
    return replace(benchmark, cases=cases, notes=())


def _works(benchmark: Benchmark) -> list[Work]:
    """Return each work once; a second connection would need the address of a peer."""
    works = (case.work for case in benchmark.cases if case.work.verb != CONNECT)
    return list(dict.fromkeys(works))


def _profile(benchmark: Benchmark, settings: Mapping[str, Any]) -> str:
    """Return the settings on which both hosts must agree."""
    options = [f"{k}={v}" for k, v in settings.items() if k != "transport"]
    return " ".join([benchmark.name, *options])


# --- transports -----------------------------------------------------------------------


def _require_known(transports: Sequence[str]) -> Sequence[str]:
    """Raise if a transport is not installed, or does not join two processes."""
    known = [name for name in registry.names() if name != "inproc"]
    for name in transports:
        if name not in known:
            why = "joins two loops of one process, and this benchmark runs two"
            raise kvwire.UsageError(
                f"--transport {name}: "
                f"{why if name == 'inproc' else 'no such backend is installed'}; "
                f"choose one of {', '.join(known)}"
            )
    return transports


def _require_able(transport: str) -> None:
    """Raise if a transport is unknown, or cannot run here."""
    _require_known([transport])
    if why := _why_unable(transport):
        raise kvwire.BackendUnavailable(f"--transport {transport}: {why}")


def _why_unable(transport: str) -> str:
    """Return why an installed backend cannot run here; "" if it can."""
    found = registry.availability(transport)
    why = "; ".join(filter(None, (found.reason, found.remedy)))
    return "" if found.available else why or "it cannot run here"


def _why_not(transport: str) -> str:
    """Return why a backend cannot move blocks between two processes; "" if it can."""
    if why := _why_unable(transport):
        return why
    can = registry.load(transport).capabilities
    if MemoryKind.HOST not in can.memory_kinds:
        return "it moves no host memory, which this benchmark measures"
    if not can.lanes:
        return "it has no lanes, and this benchmark joins two processes over tcp"
    return ""


def _kvwire(name: str, transport: str, loop: str, **more: object) -> Contender:
    options = {"transport": transport, "loop": loop, **more}
    return Contender(name, sides.left, sides.right, options=options)


def _streams(loop: str) -> Contender:
    options = {"loop": loop}
    name = f"{loop} streams"
    return Contender(name, bare.streams_left, bare.streams_right, options=options)


SOCKETS: Final = Contender("bare sockets", bare.sockets_left, bare.sockets_right)
MEMCPY: Final = Contender("memcpy", bare.memcpy)


# --- fragments ------------------------------------------------------------------------

TCP: Final = "TCP"
SAME_HOST: Final = "same host"
VERBS: Final = (PUSH, PULL, GET)
SIZES_KIB: Final = (4, 64, 1024)
# Blocks across layers are interesting only where other layouts have small fragments.
CROSS_LAYER_KIB_MAX: Final = 64
# The transports that UCX may use.
UCX: Final = {"tcp": {"UCX_TLS": "tcp"}, "shm": {"UCX_TLS": "self,sm,tcp"}}
_LAYERS_MAX: Final = 32
# Variants of a transport: the wire, the suffix of the name, environment and options.
_Way = tuple[str, str, Mapping[str, str], Mapping[str, object]]
_OTHER: Final[list[_Way]] = [(SAME_HOST, "", {}, {})]
_BY_UCX: Final[list[_Way]] = [
    (TCP, " tcp", UCX["tcp"], {}),
    (SAME_HOST, " shm", UCX["shm"], {}),
]
_WAYS: Final[Mapping[str, list[_Way]]] = {
    "tcp": [(TCP, "", {}, {})],
    "local": [(SAME_HOST, "", {}, {}), (SAME_HOST, f" {ARENA}", {}, {"memory": ARENA})],
    "nixl": _BY_UCX,
    "ucx": _BY_UCX,
}


def work_of(
    verb: str, layer_bytes: int, *, cross_layer: bool, round_bytes: int
) -> Work:
    """Return the work of one transfer of about ``round_bytes``."""
    fragments = max(2, round_bytes // layer_bytes)
    layers = min(_LAYERS_MAX, fragments // 2)
    blocks = fragments // layers
    return Work(
        verb=verb,
        nbytes=layer_bytes * layers * blocks,
        count=1,
        layers=layers,
        blocks=blocks,
        cross_layer=cross_layer,
    )


def contenders(transport: str, loop: str) -> Iterator[tuple[str, Contender]]:
    """Yield a transport's variants, each with its wire."""
    for wire, more, environment, options in _WAYS.get(transport, _OTHER):
        one = _kvwire(f"kvwire {transport}{more}", transport, loop, **options)
        yield wire, replace(one, environment=environment)


def fragments_of(
    transports: Sequence[str], works: Sequence[Work], loop: str
) -> Benchmark:
    """Make the benchmark, with the variants of ``transports`` that can run here."""
    reasons = {name: _why_not(name) for name in _require_known(transports)}
    team = [
        one
        for name in transports
        if not reasons[name]
        for one in contenders(name, loop)
    ]
    return Benchmark(
        name="fragments",
        cases=[
            Case(
                name=f"{in_bytes(work.layer_bytes)} {work.verb}, {work.layout}",
                work=work,
                unit=GIGABYTES_PER_SECOND,
                ours=ours,
                beside=[SOCKETS if wire == TCP else MEMCPY],
                group=wire,
            )
            for wire in (TCP, SAME_HOST)
            for work in works
            if (ours := [one for its, one in team if its == wire])
        ],
        missing=[
            Missing(f"kvwire {name}", reason, "cannot run here")
            for name, reason in reasons.items()
            if reason
        ],
        notes=["Bare sockets and memcpy move contiguous bytes, and verify none."],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The options of ``fragments``.

    Attributes:
        transport: Transports, separated by commas, or all that are installed. If one
            cannot run here, the output says why. local runs twice: with caches in
            ordinary memory and in arenas.
        sizes_kib: Sizes of one layer of one block, such as --sizes-kib 4 1024.
        verb: How blocks move: pushed, pulled, or got from a window.
        layout: One tensor per layer, or blocks across layers; the latter for layers of
            up to 64 KiB.
        round_mib: MiB that each contender moves in a round.
    """

    transport: str = "all"
    sizes_kib: Kibibytes = SIZES_KIB
    verb: Literal["push", "pull", "get", "all"] = "all"
    layout: Literal["per-layer", "cross-layer", "both"] = "both"
    round_mib: Mebibytes = 64

    def benchmark(self, common: Common) -> Benchmark:
        """Return the cases for these options."""
        transports = self.transport.split(",")
        if self.transport == "all":
            transports = [name for name in registry.names() if name != "inproc"]
            if common.peer or common.listen:
                transports = [name for name in transports if _joins_hosts(name)]
        across = {"per-layer": (False,), "cross-layer": (True,), "both": (False, True)}
        works = [
            work_of(one, kib * KIB, cross_layer=cross, round_bytes=self.round_mib * MIB)
            for kib in sorted(set(self.sizes_kib))
            for cross in across[self.layout]
            for one in (VERBS if self.verb == "all" else (self.verb,))
            if not cross or kib <= CROSS_LAYER_KIB_MAX
        ]
        if not works:
            raise kvwire.UsageError("--layout cross-layer takes sizes of up to 64 KiB")
        return fragments_of(transports, works, common.loop)


def _joins_hosts(transport: str) -> bool:
    able = not _why_not(transport)
    return able and not registry.load(transport).capabilities.same_host


_SHAPES: Final = Shapes()


@app.command
def fragments(
    *, shapes: Annotated[Shapes, Parameter(name="*")] = _SHAPES, common: Common = COMMON
) -> int:
    """Measure how scattered blocks of a cache move, from 4 KiB to 16 MiB.

    They are compared with one stream of bare sockets, and within one host with a
    memcpy.
    """
    benchmark = shapes.benchmark(common)
    failed = _run(benchmark, common, **asdict(shapes))
    return failed or int(shapes.transport != "all" and bool(benchmark.missing))


# --- ops and messages -----------------------------------------------------------------

# Operations per round: enough that rare frames, such as CREDIT, count too.
COUNT: Final = 40
# Large messages, with so many in flight that the wire is never idle between two.
SIZES: Final = (1 * MIB, 16 * MIB)
IN_FLIGHT: Final = 4


def operations() -> dict[str, Work]:
    """Return all operations of ``kvwire bench ops``, by the name of their row."""
    kib64 = 64 * KIB
    works = [
        Work(verb=verb, nbytes=nbytes, count=count, layers=layers, blocks=blocks)
        for verb, nbytes, count, layers, blocks in (
            (CONNECT, 0, COUNT // 4, 0, 1),
            (PULL, kib64, COUNT, 16, 1),
            (PULL, 256 * KIB, COUNT, 16, 2),
            (PUSH, 256 * KIB, COUNT, 16, 2),
            (PUSH, 4 * MIB, COUNT, 32, 2),
            (READY, 80 * kib64, 1, 80, 1),
            (ROUND_TRIP, 64, 10 * COUNT, 0, 1),
            (SEND, kib64, COUNT, 0, 1),
            (SEND, MIB, COUNT, 0, 1),
            (PUT, kib64, COUNT, 0, 1),
            (GET, kib64, COUNT, 0, 1),
            (GET, kib64, 10 * COUNT, 16, 1),
            (GET, 256 * KIB, 10 * COUNT, 16, 2),
        )
    ]
    return {work.name: work for work in works}


def ops_of(transport: str, loop: str) -> Benchmark:
    """Make the benchmark; over local, windows are also in an arena."""
    _require_able(transport)
    ours = _kvwire(f"kvwire {transport}", transport, loop)
    streams = _streams(loop)
    cases = [
        Case(
            name=name,
            work=work,
            unit=MICROSECONDS,
            ours=[ours],
            beside=[] if work.verb == READY else [streams],
        )
        for name, work in operations().items()
    ]
    if transport == "local":
        mapped = _kvwire(f"{ours.name} {ARENA}", transport, loop, memory=ARENA)
        cases += [
            replace(case, name=f"{case.name}, {ARENA}", ours=[mapped])
            for case in cases
            if case.work.verb == GET and case.work.layers
        ]
    notes = ["Streams send a request and get an answer, and verify no bytes."]
    return Benchmark(name="ops", cases=cases, notes=notes)


@app.command
def ops(*, transport: str = "tcp", common: Common = COMMON) -> int:
    """Measure single operations: the time, and each side's CPU.

    The operations are connects; transfers; one layer of many; messages, put and get;
    and blocks from a window (with local: from ordinary memory and from arenas). They
    are compared with bare streams on the same loop.

    Args:
        transport: The transport of kvwire.
        common: Options of every benchmark.
    """
    return _run(ops_of(transport, common.loop), common, transport=transport)


def messages_of(transport: str, loop: str, round_bytes: int) -> Benchmark:
    """Make the benchmark; a transport with links is the link, not a lane beside tcp."""
    _require_able(transport)
    ours = _kvwire(f"kvwire {transport}", transport, loop, by_link=1)
    ping = operations()["round trip, 64 B"]
    rates = [
        Work(
            verb=verb,
            nbytes=nbytes,
            count=max(IN_FLIGHT, round_bytes // nbytes),
            in_flight=IN_FLIGHT,
        )
        for nbytes in SIZES
        for verb in (SEND, PUT, GET)
    ]
    cases = [
        Case(
            name=ping.name,
            work=ping,
            unit=MICROSECONDS,
            ours=[ours],
            beside=[_streams(loop)],
            tail=True,
        )
    ]
    cases += [
        Case(
            name=work.name,
            work=work,
            unit=GIGABYTES_PER_SECOND,
            ours=[ours],
            beside=[SOCKETS],
        )
        for work in rates
    ]
    notes = [f"{IN_FLIGHT} operations in flight. Only kvwire verifies the bytes."]
    return Benchmark(name="messages", cases=cases, notes=notes)


@app.command
def messages(
    *, transport: str = "tcp", round_mib: Mebibytes = 256, common: Common = COMMON
) -> int:
    """Measure round trips of 64 bytes; send, put and get of 1 MiB and 16 MiB.

    They are compared with a ping-pong over bare streams on the same loop, and over
    blocking sockets.

    Args:
        transport: The transport of kvwire.
        round_mib: MiB that each contender moves per round, for rates.
        common: Options of every benchmark.
    """
    benchmark = messages_of(transport, common.loop, round_mib * MIB)
    return _run(benchmark, common, transport=transport, round_mib=round_mib)
