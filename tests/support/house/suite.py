"""What a test may not do: wait for a clock, assert nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.house import check
from tests.support.tree import TESTS, Source

# Helpers that assert for the test that calls them are named so.
ASSERTING = ("assert_", "check", "expect", "fnmatch_lines", "no_fnmatch", "run_state_")
_PYTEST_ASKS = {"pytest.raises", "pytest.warns", "pytest.fail", "pytest.skip"}


def sleeps(source: Source) -> Iterator[check.Finding]:
    """Waiting for time to pass. ``sleep(0)`` only gives other tasks a turn."""
    for name, function in check.functions(source.syntax):
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or _is_zero(node.args):
                continue
            if check.dotted(node.func).rpartition(".")[2] == "sleep":
                text = "wait for an event, not for time"
                yield check.Finding(source.path, node.lineno, name, text)


def _is_zero(arguments: list[ast.expr]) -> bool:
    match arguments:
        case [ast.Constant(value=0)]:
            return True
        case _:
            return False


def idle_tests(source: Source) -> Iterator[check.Finding]:
    """A test that asserts nothing, neither itself nor through a named helper."""
    for name, function in check.functions(source.syntax):
        bare = name.rpartition(".")[2]
        if bare.startswith("test_") and "<locals>" not in name and not _asks(function):
            yield check.Finding(source.path, function.lineno, name, "asserts nothing")


def _asks(function: check.AnyFunction) -> bool:
    if any(check.dotted(d).startswith(ASSERTING) for d in function.decorator_list):
        return True
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = check.dotted(node.func)
            last = called.rpartition(".")[2] or getattr(node.func, "attr", "")
            if called in _PYTEST_ASKS or last.lstrip("_").startswith(ASSERTING):
                return True
    return False


CHECKS = (
    check.Check(
        name="tests do not sleep",
        over=TESTS,
        # Programs that people run: a benchmark pauses between its measurements, and a
        # soak between its faults. A slow network is slow, planted mistakes take time.
        beyond=(
            "packages/certify/tests/bench/",
            "packages/vllm/tests/programs/handover.py",
            "tests/programs/soak/",
            "tests/support/proxy.py",
            # A guest's files change without a word; an owner offers at any time.
            "tests/rdma/hosts.py",
            "tests/rdma/windows.py",
            "packages/certify/tests/plants.py",
        ),
        find=check.each(sleeps),
        bad=[
            ("tests/a.py", "async def test_a():\n    await asyncio.sleep(0.1)"),
            ("tests/a.py", "def test_a():\n    time.sleep(1)"),
            ("tests/a.py", "def test_a():\n    sleep(delay)"),
        ],
        good=[("tests/a.py", "async def test_a():\n    await asyncio.sleep(0)")],
        excused={
            "tests/driver/lanes/test_scheduler.py::"
            "test_the_end_of_a_connection_is_no_broken_lane": "a warning would come "
            "after its delay, and nothing announces that none comes",
            "tests/support/leaks.py::_opened_since": "a fixture's thread tells nobody "
            "that it has closed something",
            "tests/support/virtual_time.py::pass_time": "it waits in virtual time, "
            "which takes no real time",
        },
    ),
    check.Check(
        name="tests assert something",
        over=TESTS,
        find=check.each(idle_tests),
        bad=[
            ("tests/a.py", "def test_a():\n    run()"),
            ("tests/a.py", "class TestA:\n    async def test_a(self):\n        ..."),
        ],
        good=[
            ("tests/a.py", "def test_a():\n    assert run()"),
            ("tests/a.py", "def test_a():\n    with pytest.raises(E):\n        run()"),
            ("tests/a.py", "def test_a():\n    assert_closed(pair)"),
            ("tests/a.py", "def helper():\n    run()"),
            ("tests/a.py", "@expect_found\ndef test_a():\n    run()"),
        ],
    ),
)
