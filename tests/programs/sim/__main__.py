"""``python -m tests.programs.sim``: run seeds, show one, make a failing one small."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from tests.programs.sim.run import Result, command, described, run_seed, shrink

# Seeds that one job runs before it reports.
_BATCH: Final = 50
_FAILURES_SHOWN: Final = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; return an exit status."""
    options = _parser().parse_args(arguments)
    if options.seed is not None:
        return _show(options.seed, options.keep, whole=options.trace)
    return _sweep(range(options.start, options.start + options.seeds), options.jobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.sim", description=__doc__
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many to run")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    parser.add_argument(
        "--seed", type=int, help="run this one and shrink it if it fails"
    )
    parser.add_argument("--trace", action="store_true", help="show all that happens")
    parser.add_argument(
        "--keep",
        type=lambda text: [int(number) for number in text.split(",") if number],
        help="run only these steps of the seed, as the shrinker names them",
    )
    return parser


def _sweep(seeds: range, jobs: int) -> int:
    began = time.perf_counter()
    failed: list[Result] = []
    digest = hashlib.sha256()
    completions = 0
    for result in _results(seeds, jobs):
        digest.update(result.digest.encode())
        completions += result.completions
        if result.error is not None:
            failed.append(result)
    took_s = time.perf_counter() - began
    print(
        f"{len(seeds)} schedules in {took_s:.1f} s ({len(seeds) / took_s:.0f}/s), "
        f"{completions} completions, {len(failed)} failed, "
        f"trace {digest.hexdigest()[:16]}"
    )
    for result in failed[:_FAILURES_SHOWN]:
        print(f"\nseed {result.plan.seed} failed; its last events:")
        print(described(result))
        print(f"repeat it: {command(result.plan.seed)}")
    if more := failed[_FAILURES_SHOWN:]:
        print(f"\nand: {' '.join(str(result.plan.seed) for result in more)}")
    return 1 if failed else 0


def _results(seeds: range, jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from map(_run, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_run, seeds, chunksize=_BATCH)


def _run(seed: int) -> Result:
    """One seed; the trace of one that did not fail is not worth carrying."""
    result = run_seed(seed)
    if result.error is None:
        result.trace.clear()
    return result


def _show(seed: int, keep: list[int] | None, *, whole: bool) -> int:
    result = run_seed(seed, keep)
    print(result.plan.setup)
    print(described(result, whole=whole))
    if result.error is None:
        print(f"seed {seed} passes, trace {result.digest}")
        return 0
    if keep is None:
        small = shrink(result)
        print(f"\nsmallest failing plan, found in {small.runs} runs:")
        print(small.result.plan.setup)
        for number, step in zip(small.keep, small.result.plan.steps, strict=True):
            print(f"  {number:>3}  {step.at:.6f}  {step.verb.value}, node {step.node}")
        print(described(small.result))
        print(f"repeat it: {command(seed, small.keep)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
