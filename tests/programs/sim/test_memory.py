"""A lease notices each access that comes too late, too far or the wrong way."""

from __future__ import annotations

import pytest

from kvwire_certify.oracle import Wrong
from tests.programs.sim.memory import POISON, Lease


def test_an_access_is_within_the_lease_and_as_it_allows() -> None:
    lease = Lease(100, readable=True)
    lease.store(10, b"hello")
    assert lease.read(10, 5) == b"hello"
    for offset, nbytes in ((-1, 1), (0, 101), (100, 1), (64, 37)):
        with pytest.raises(Wrong, match="memory-range"):
            lease.read(offset, nbytes)
    with pytest.raises(Wrong, match="memory-right"):
        lease.write(0, b"x")
    with pytest.raises(Wrong, match="memory-right"):
        Lease(10, writable=True).read(0, 1)
    assert Lease(0).read(0, 0) == b""


def test_a_late_access_is_found_in_the_whole_and_in_a_part_of_it() -> None:
    lease = Lease(100, readable=True, writable=True)
    part = lease.part(64, 36)
    part.write(0, b"hello")
    assert lease.load(64, 5) == b"hello"
    lease.free()
    assert part.load(0, 36) == POISON * 36
    for late in (lease, part):
        with pytest.raises(Wrong, match="memory-reuse"):
            late.read(0, 1)
        with pytest.raises(Wrong, match="memory-reuse"):
            late.write(30, b"x")
