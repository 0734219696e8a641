"""``python -m tests.bench profile``: where the time of a KV transfer goes.

Two processes move the blocks of ``kvwire bench fragments``, plain and then under
cProfile. What a round takes is of the plain ones; the profiler slows Python down and C
not at all, so its table says only what is large and how often it is called. It counts
CPU time, which other jobs disturb least. A C function that ctypes calls is in the time
of its caller.
"""

from __future__ import annotations

import cProfile
import resource
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvwire.cli.bench.operations import OpsSide, OpsWork
from kvwire.cli.bench.pair import Contender

_ROOT: Final = Path(__file__).parents[2]
_OURS: Final = ("kvwire/", "backends/")
SIDES: Final = ("left", "right")
COSTS: Final = ("wall ms", "user ms", "kernel ms", "sleeps", "page faults")


class ProfiledSide(OpsSide):
    """A side whose rounds answer with their costs, and with a profile if asked for."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._profiled = options["profiled"] == "True"

    async def drive(self, work: OpsWork) -> Any:
        return await self._measured(super().drive(work))

    async def serve(self, work: OpsWork) -> Any:
        return await self._measured(super().serve(work))

    async def _measured(self, moving: Awaitable[object]) -> dict[str, Any]:
        profiler = cProfile.Profile(time.thread_time)
        before = costs()
        with profiler if self._profiled else nullcontext():
            seconds = await moving
        spent = [after - begun for after, begun in zip(costs(), before, strict=True)]
        found = functions(profiler)
        return {"seconds": seconds, "spent": spent, "functions": found}


def costs() -> list[float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = time.perf_counter(), used.ru_utime, used.ru_stime
    return [*(1e3 * s for s in seconds), used.ru_nvcsw, used.ru_minflt]


def functions(profiler: cProfile.Profile) -> list[tuple[str, int, float]]:
    """Return place and name, calls and own milliseconds of each that was called."""
    found = []
    for entry in profiler.getstats():
        code: Any = entry.code
        if not isinstance(code, str):
            path = Path(code.co_filename)
            ours = path.is_relative_to(_ROOT) and "site-packages" not in path.parts
            where = path.relative_to(_ROOT) if ours else path.name
            code = f"{where} {code.co_qualname}"
        found.append((code, entry.callcount, 1e3 * entry.inlinetime))
    return sorted(found, key=lambda one: -one[2])


def rounds_of(
    work: OpsWork,
    count: int,
    options: Mapping[str, object],
    environment: Mapping[str, str],
) -> list[list[dict[str, Any]]]:
    """Return what both sides answer in ``count`` rounds; the first is no round."""
    contender = Contender(
        "profile", ProfiledSide, options=options, environment=environment
    )
    with contender.start() as pair:
        pair.check(work)
        return [pair.move(work) for _ in range(count + 1)][1:]


def profile(
    work: OpsWork,
    rounds: int,
    top: int,
    options: Mapping[str, object],
    environment: Mapping[str, str],
) -> Iterator[str]:
    """Yield lines: the medians of plain rounds for each side, and its top functions."""
    plain = rounds_of(work, rounds, {**options, "profiled": False}, environment)
    rate = work.moved_bytes / median(left["seconds"][0] for left, _ in plain)
    yield f"a round of {work.moved_bytes >> 20} MiB: {rate / 1e9:.2f} GB/s"
    for number, side in enumerate(SIDES):
        each = zip(*(answers[number]["spent"] for answers in plain), strict=True)
        medians = zip(COSTS, map(median, each), strict=True)
        yield f"{side}: " + ", ".join(f"{name} {value:.2f}" for name, value in medians)
    (profiled,) = rounds_of(work, 1, {**options, "profiled": True}, environment)
    for side, answer in zip(SIDES, profiled, strict=True):
        found = answer["functions"]
        _, user_ms, kernel_ms, *_ = answer["spent"]
        all_ms = user_ms + kernel_ms
        ours_ms = sum(own_ms for name, _, own_ms in found if name.startswith(_OURS))
        yield f"\n{side}, under the profiler: {ours_ms / all_ms:.0%} in kvwire's Python"
        yield "    %       ms   calls"
        for name, calls, own_ms in found[:top]:
            share = 100 * own_ms / all_ms
            yield f"{share:5.1f} {own_ms:8.3f} {calls:7}  {name}"
