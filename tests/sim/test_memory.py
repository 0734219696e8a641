"""Shadow memory notices each access that comes too late, too far or the wrong way."""

from __future__ import annotations

import pytest

from tests.sim.content import content
from tests.sim.memory import LINE_BYTES, Memory
from tests.sim.violation import Violation


def expect_violation(rule: str, verb: object, *arguments: object) -> None:
    """The access fails the seed, by this rule."""
    assert callable(verb)
    with pytest.raises(Violation) as caught:
        verb(*arguments)
    assert caught.value.rule == rule


def test_what_is_written_is_read() -> None:
    memory = Memory()
    lease = memory.lend(100, readable=True, writable=True)
    memory.write(lease, 10, b"hello")
    assert memory.read(lease, 10, 5) == b"hello"
    assert memory.load(lease, 9, 7) == b"\0hello\0"


def test_a_late_access_is_a_violation_though_nobody_has_the_memory() -> None:
    memory = Memory()
    lease = memory.lend(100, readable=True, writable=True)
    memory.free(lease)
    expect_violation("memory-reuse", memory.read, lease, 0, 1)
    expect_violation("memory-reuse", memory.write, lease, 99, b"x")


def test_a_late_access_is_a_violation_when_somebody_else_has_the_memory() -> None:
    memory = Memory()
    old = memory.lend(100, readable=True, writable=True)
    memory.free(old)
    new = memory.lend(100, readable=True, writable=True)
    assert new.start == old.start, "what came back last is handed out first"
    expect_violation("memory-reuse", memory.write, old, 0, b"x")
    memory.write(new, 0, b"x")


def test_memory_that_came_back_holds_poison() -> None:
    memory = Memory()
    lease = memory.lend(LINE_BYTES, readable=True, writable=True)
    memory.store(lease, 0, bytes(LINE_BYTES))
    memory.free(lease)
    assert memory.load(lease, 0, LINE_BYTES) == b"\xdb" * LINE_BYTES


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 101), (100, 1), (64, 37)])
def test_beyond_the_lease(offset: int, nbytes: int) -> None:
    """Also within its last line, where the line itself would allow it."""
    memory = Memory()
    lease = memory.lend(100, readable=True, writable=True)
    memory.lend(100, readable=True, writable=True)
    expect_violation("memory-range", memory.read, lease, offset, nbytes)


def test_rights() -> None:
    memory = Memory()
    source = memory.lend(10, readable=True, writable=False)
    target = memory.lend(10, readable=False, writable=True)
    expect_violation("memory-right", memory.write, source, 0, b"x")
    expect_violation("memory-right", memory.read, target, 0, 1)
    memory.store(source, 0, b"x")
    assert memory.read(source, 0, 1) == b"x"


def test_nothing_is_always_allowed() -> None:
    memory = Memory()
    lease = memory.lend(0, readable=False, writable=False)
    assert memory.read(lease, 0, 0) == b""
    memory.free(lease)
    assert memory.leases == 0


def test_content_tells_whose_it_is_and_where() -> None:
    """No two numbers share a window, and no window repeats within itself."""
    windows = [content(number, 4096) for number in range(2000)]
    assert len(set(windows)) == len(windows)
    lines = [windows[3][at : at + LINE_BYTES] for at in range(0, 4096, LINE_BYTES)]
    assert len(set(lines)) == len(lines)
