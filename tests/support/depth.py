"""Says how much of a large set a run looks at: a sample, or all of it.

``make test`` takes a fixed sample where all would take minutes; ``make test-all``
passes ``--thorough`` and takes all. Property tests that name no number of examples take
30 in the first and hypothesis's 100 in the second.

A soak takes other examples, any number of them, from a seed that the report names::

    pytest --soak 2000 --hypothesis-seed 7 tests/transfers/test_machine.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")

_EXAMPLES = 30
_run = {"thorough": False, "soak": 0}

# Property tests take the same examples in every run and are not timed: what fails once
# fails again, on any machine.
settings.register_profile("all", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("some", settings.get_profile("all"), max_examples=_EXAMPLES)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Hook of pytest: the option that asks for all."""
    parser.addoption(
        "--thorough", action="store_true", help="all cases of large sets, no samples"
    )
    parser.addoption(
        "--rdma", action="store_true", help="the tests in guests with an RDMA device"
    )
    parser.addoption(
        "--soak",
        type=int,
        default=0,
        metavar="EXAMPLES",
        help="that many examples of each property test, from --hypothesis-seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hook of pytest: what the option says, before any test is imported."""
    _run["thorough"] = config.getoption("--thorough")
    settings.load_profile("all" if _run["thorough"] else "some")
    _run["soak"] = config.getoption("--soak")
    if not _run["soak"]:
        return
    if config.getoption("--hypothesis-seed") is None:
        raise pytest.UsageError("--soak: name its examples with --hypothesis-seed")
    settings.register_profile(
        "soak",
        settings.get_profile("all"),
        max_examples=_run["soak"],
        derandomize=False,
    )
    settings.load_profile("soak")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Hook of pytest: the seed of a soak."""
    if not _run["soak"]:
        return None
    seed = config.getoption("--hypothesis-seed")
    return f"soak: {_run['soak']} examples of each property, seed {seed}"


def sample(cases: Iterable[T], every: int) -> Iterator[T]:
    """Yield each case in a thorough run, and each ``every``-th one in another."""
    yield from itertools.islice(cases, 0, None, 1 if _run["thorough"] else every)


def parameters(cases: Iterable[T], every: int) -> list[pytest.ParameterSet]:
    """Parameters of a test, all but each ``every``-th one marked ``matrix``."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.matrix if number % every else (),
        )
        for number, case in enumerate(cases)
    ]


def examples(count: int) -> int:
    """How many examples a property test takes that names a number: a fifth, or all."""
    if _run["soak"]:
        return _run["soak"]
    return count if _run["thorough"] else count // 5
