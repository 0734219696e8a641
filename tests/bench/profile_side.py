"""One side of :mod:`tests.bench.profile_transfer`: moves blocks, and says what it did.

The same half as that of ``kvwire bench fragments``, whose rounds answer with what they
cost this process, and by function if it runs with ``profiled=cpu`` or ``wall``.
"""

from __future__ import annotations

import cProfile
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvwire.cli.bench.fragments import FragmentsSide, FragmentWork
from tests.bench import foreign

_ROOT: Final = Path(__file__).parents[2]
# Kinds of functions.
FOREIGN: Final = "C, by ctypes"
BUILT_IN: Final = "C"
OURS: Final = "kvwire"
PYTHON: Final = "other Python"
# The CPU time of the loop's thread is not disturbed by what else the machine does.
CLOCKS: Final[dict[str, Callable[[], float] | None]] = {
    "no": None,
    "cpu": time.thread_time,
    "wall": time.perf_counter,
}


class ProfiledSide(FragmentsSide):
    """A side whose option ``profiled`` says what functions are told apart by."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._clock = CLOCKS[options["profiled"]]
        if self._clock is not None:
            foreign.name_calls()

    async def drive(self, work: FragmentWork) -> dict[str, Any]:
        return await self._measured(super().drive, work)

    async def serve(self, work: FragmentWork) -> dict[str, Any]:
        return await self._measured(super().serve, work)

    async def _measured(
        self,
        do: Callable[[FragmentWork], Awaitable[dict[str, Any]]],
        work: FragmentWork,
    ) -> dict[str, Any]:
        profiler = cProfile.Profile(self._clock or time.perf_counter)
        before = spent()
        if self._clock is not None:
            profiler.enable()
        try:
            answer = await do(work)
        finally:
            profiler.disable()
        after = spent()
        cost = {name: after[name] - before[name] for name in after}
        return {**answer, "spent": cost, "functions": functions(profiler)}


def spent() -> dict[str, float]:
    """What this process has used so far; seconds, and counts."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall_s": time.perf_counter(),
        "user_s": used.ru_utime,
        "kernel_s": used.ru_stime,
        "sleeps": used.ru_nvcsw,
        "taken_away": used.ru_nivcsw,
        "page_faults": used.ru_minflt,
    }


def functions(profiler: cProfile.Profile) -> list[dict[str, Any]]:
    """Of a profile: name, kind, calls and own seconds of every function."""
    found = []
    for entry in profiler.getstats():
        name, kind = _named(entry.code)
        one = {"name": name, "kind": kind, "calls": entry.callcount}
        found.append({**one, "own_s": entry.inlinetime})
    return found


def _named(code: Any) -> tuple[str, str]:
    """Such as ``kvwire/driver/connection_driver.py run``, and its kind."""
    if isinstance(code, str):
        return code.strip("<>").removeprefix("built-in method "), BUILT_IN
    if code.co_filename == foreign.WHERE:
        return code.co_name, FOREIGN
    path = Path(code.co_filename)
    if path.is_relative_to(_ROOT) and not path.is_relative_to(_ROOT / ".venv"):
        return f"{path.relative_to(_ROOT)} {code.co_qualname}", OURS
    return f"{path.name} {code.co_qualname}", PYTHON
