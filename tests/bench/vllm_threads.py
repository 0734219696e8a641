"""What each thread of vLLM engines computes for a request, from the kernel's counters.

``python -m tests.bench.vllm_threads --only "tcp, at" --lengths 300x10,1500x6`` runs the
servers of :mod:`tests.bench.vllm_handover` and reads ``/proc`` around each request.
kvwire's thread is called ``kvwire-engine``; the ``main`` thread of the process that has
it computes the forward pass. A request ends with decode's last token: what an engine
does later is not counted. With ``--extra '{}' --extra '{"group_bytes": 0}'`` each
contender is there once for each ``kv_connector_extra_config``, and they take turns.
Medians of all requests of a length; Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench.vllm_handover import SETTLES_WITHIN_S, counts
from tests.bench.vllm_requests import Sample
from tests.bench.vllm_running import FIRST, Turn, chosen, running
from tests.bench.vllm_servers import PLACEMENTS, SHAPES, Contender, varied
from tests.integrations.vllm.serving import prompt

_PROC: Final = Path("/proc")
# Of one request; other threads have hardly run.
_SHOWN_MS: Final = 1.0
# By how many engines take part.
_SIDES: Final = {1: ("alone",), 2: ("prefill", "decode")}


class Thread(NamedTuple):
    """What threads that do the same have in common."""

    # Of its engine.
    side: str
    # Its name.
    process: str
    # Its own, ``main`` for the first one of a process.
    name: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What a thread has used."""

    # It was on a core.
    run_ms: float = 0.0
    # It wanted to be on one.
    queued_ms: float = 0.0
    # How often it had nothing to do.
    sleeps: float = 0.0
    # How often another one got its core.
    taken_away: float = 0.0
    # Pages that it touched for the first time.
    faults: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(
            *(a - b for a, b in zip(astuple(self), astuple(other), strict=True))
        )


@dataclass(slots=True)
class Seen:
    """The requests of one contender and length."""

    samples: list[Sample] = field(default_factory=list)
    used: list[dict[Thread, Usage]] = field(default_factory=list)


def main() -> int:
    """Measure and print; the exit status."""
    options = _options()
    seeds = itertools.count(1)
    for group in chosen(options.only):
        with running(
            _varied(group, options.extra),
            options.shape,
            wire=options.wire,
            placement=PLACEMENTS[options.placement],
        ) as turns:
            for turn, length in itertools.product(turns, FIRST):
                turn.ask(prompt(length, next(seeds)))
            for length, repeats in counts(options.lengths):
                seen = {turn.name: Seen() for turn in turns}
                for turn in itertools.chain.from_iterable([turns] * repeats):
                    prompts = [
                        prompt(length, next(seeds)) for _ in range(options.together)
                    ]
                    _watch(turn, prompts, seen[turn.name])
                print(f"\n{length} tokens x {options.together}\n")
                print(table(seen))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="64KiB")
    parser.add_argument("--lengths", default="300x10,1500x6,4000x3")
    parser.add_argument("--together", type=int, default=1, help="requests at a time")
    parser.add_argument("--only", action="append", help="contenders, by parts of names")
    parser.add_argument("--wire", default="", help="a rate between two hosts: 1gbit")
    parser.add_argument("--placement", choices=PLACEMENTS, default="bound")
    parser.add_argument(
        "--extra", action="append", help="kv_connector_extra_config, each in its turn"
    )
    return parser.parse_args()


def _varied(
    group: Sequence[Contender], extras: Sequence[str] | None
) -> Sequence[Contender]:
    """The contenders once for each text of configuration; as they are for None."""
    if extras is None:
        return group
    return [
        varied(one, number, json.loads(extra))
        for number, extra in enumerate(extras)
        for one in group
    ]


def _watch(turn: Turn, prompts: Sequence[list[int]], seen: Seen) -> None:
    """Ask once, and note what each thread did meanwhile."""
    threading.Event().wait(SETTLES_WITHIN_S)  # what the last one left to do is done
    sides = dict(zip(_SIDES[len(turn.engines)], turn.engines, strict=True))
    pids = {
        side: list(descendants(engine.running.pid))
        for side, engine in sides.items()
        if engine.running is not None
    }
    before = {side: usages(own) for side, own in pids.items()}
    with ThreadPoolExecutor(len(prompts)) as pool:
        seen.samples += pool.map(turn.ask, prompts)
    used: dict[Thread, Usage] = {}
    for side, own in pids.items():
        for (process, name), usage in spent(before[side], usages(own)).items():
            used[Thread(side, process, name)] = usage
    seen.used.append(used)


# --- /proc ----------------------------------------------------------------------------


def descendants(pid: int, proc: Path = _PROC) -> Iterator[int]:
    """A process, and all that it and they have started."""
    yield pid
    for task in proc.glob(f"{pid}/task/*/children"):
        with suppress(OSError):  # it has ended meanwhile
            for child in task.read_text().split():
                yield from descendants(int(child), proc)


Names = tuple[str, str]
"""Of a process and of a thread."""


def usages(
    pids: Iterable[int], proc: Path = _PROC
) -> dict[tuple[int, int], tuple[Names, Usage]]:
    """The name and the usage of every thread, by process and thread id."""
    found = {}
    for pid in pids:
        for task in proc.glob(f"{pid}/task/*"):
            with suppress(OSError):  # it has ended meanwhile
                process = (proc / str(pid) / "comm").read_text().strip()
                own = (task / "comm").read_text().strip()
                tid = int(task.name)
                names = (process, "main" if tid == pid else own)
                found[pid, tid] = (names, usage_of(task))
    return found


def usage_of(task: Path) -> Usage:
    """Read the counters of one thread."""
    run_ns, queued_ns, _ = map(int, (task / "schedstat").read_text().split())
    lines = (task / "status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    # The name, in brackets, may hold anything.
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return Usage(
        run_ns / 1e6,
        queued_ns / 1e6,
        int(status["voluntary_ctxt_switches"]),
        int(status["nonvoluntary_ctxt_switches"]),
        int(fields[7]),
    )


def spent(
    before: Mapping[tuple[int, int], tuple[Names, Usage]],
    after: Mapping[tuple[int, int], tuple[Names, Usage]],
) -> dict[Names, Usage]:
    """What was used in between, added up by names; threads that are new began at 0."""
    used: dict[Names, Usage] = {}
    for key, (names, usage) in after.items():
        begun = before[key][1] if key in before else Usage()
        used[names] = used.get(names, Usage()) + (usage - begun)
    return used


# --- what is said ---------------------------------------------------------------------


def table(seen: Mapping[str, Seen]) -> str:
    """Medians, as a table of Markdown."""
    lines = [
        "| | thread | runs, ms | queued, ms | sleeps | taken away | page faults |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of in seen.items():
        lines.append(f"| {name}{_answered(of.samples)} | | | | | | |")
        for thread, usage in _medians(of.used):
            if usage.run_ms < _SHOWN_MS:
                continue
            cells = [f"{usage.run_ms:.1f}", f"{usage.queued_ms:.1f}"]
            cells += [
                f"{n:.0f}" for n in (usage.sleeps, usage.taken_away, usage.faults)
            ]
            lines.append(
                f"| {thread.side} | {thread.process}: {thread.name} | "
                f"{' | '.join(cells)} |"
            )
    return "\n".join(lines)


def _answered(samples: Sequence[Sample]) -> str:
    parts = {"prefill": "prefill_s", "handover": "handover_s", "a step": "step_s"}
    medians = {
        what: statistics.median(getattr(sample, field) for sample in samples) * 1000
        for what, field in parts.items()
    }
    known = [f"{what} {ms:.0f} ms" for what, ms in medians.items() if ms == ms]
    return ": " + ", ".join(known)


def _medians(used: Sequence[Mapping[Thread, Usage]]) -> list[tuple[Thread, Usage]]:
    """Of each thread over all requests; the busiest of each engine first."""
    threads = set(itertools.chain.from_iterable(used))
    found = []
    for thread in threads:
        columns = zip(*(astuple(one.get(thread, Usage())) for one in used), strict=True)
        found.append((thread, Usage(*map(statistics.median, columns))))
    sides = list(itertools.chain.from_iterable(_SIDES.values()))
    return sorted(found, key=lambda one: (sides.index(one[0].side), -one[1].run_ms))


if __name__ == "__main__":
    sys.exit(main())
