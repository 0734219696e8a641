"""Shadow memory notices each access that comes too late, too far or the wrong way."""

from __future__ import annotations

import pytest

from kvwire_certify.oracle import Wrong
from tests.programs.sim.memory import LINE_BYTES, Memory


def expect_violation(rule: str, verb: object, *arguments: object) -> None:
    """The access fails the seed, by this rule."""
    assert callable(verb)
    with pytest.raises(Wrong) as caught:
        verb(*arguments)
    assert caught.value.rule == rule


def test_each_line_has_one_owner() -> None:
    """A late access is found, whether or not somebody else has the memory by then."""
    memory = Memory()
    old = memory.lend(100, readable=True, writable=True)
    memory.write(old, 10, b"hello")
    assert memory.read(old, 10, 5) == b"hello"
    memory.free(old)
    assert memory.load(old, 0, LINE_BYTES) == b"\xdb" * LINE_BYTES
    expect_violation("memory-reuse", memory.read, old, 0, 1)
    new = memory.lend(100, readable=True, writable=True)
    assert new.start == old.start, "what came back last is handed out first"
    expect_violation("memory-reuse", memory.write, old, 99, b"x")
    memory.write(new, 0, b"x")
    # Beyond it, also within its last line, where the line itself would allow it.
    memory.lend(100, readable=True, writable=True)
    for offset, nbytes in ((-1, 1), (0, 101), (100, 1), (64, 37)):
        expect_violation("memory-range", memory.read, new, offset, nbytes)


def test_rights() -> None:
    memory = Memory()
    source = memory.lend(10, readable=True, writable=False)
    target = memory.lend(10, readable=False, writable=True)
    expect_violation("memory-right", memory.write, source, 0, b"x")
    expect_violation("memory-right", memory.read, target, 0, 1)
    memory.store(source, 0, b"x")
    assert memory.read(source, 0, 1) == b"x"
    nothing = memory.lend(0, readable=False, writable=False)
    assert memory.read(nothing, 0, 0) == b""
