"""Arenas: memory that can be shared, and can only be read by who it is shared with."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from kvwire.errors import UsageError, with_remedy
from kvwire.kv.fragments import Fragments
from kvwire.memory.arena import (
    HUGE_PAGE_BYTES,
    SEALS,
    Arena,
    SharedMapping,
    arena_at,
    arena_of,
)
from kvwire.memory.buffers import MID_PAGE_BYTES
from kvwire.memory.copy import as_fragments
from kvwire_certify.conformance.rig import open_descriptors

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="memory is shared by descriptor on Linux only"
)


def test_arrays_are_zero_apart_and_aligned() -> None:
    with Arena(1 << 20) as arena:
        first = arena.numpy((3, 5), np.float32)
        second = arena.numpy(7, "u1")
        assert first.shape == (3, 5)
        assert not first.any()
        first[:] = 1.5
        second[:] = 9
        assert (first == 1.5).all()
        for array in (first, second):
            assert array.ctypes.data % 64 == 0
            assert array.flags.writeable
        del first, second, array


def test_sizes_are_whole_pages_and_used_up() -> None:
    with Arena(1) as arena:
        assert arena.nbytes == mmap.PAGESIZE
        arena.buffer(mmap.PAGESIZE - 64)
        with pytest.raises(UsageError, match="65 bytes do not fit"):
            arena.buffer(65)
        assert len(arena.buffer(64)) == 64
        assert "used" in repr(arena)


def test_what_cannot_be_shared_is_refused() -> None:
    for nbytes in (0, -1):
        with pytest.raises(UsageError, match="at least 1 byte"):
            Arena(nbytes)
    with Arena(4096) as arena:
        with pytest.raises(UsageError, match="cannot be shared"):
            arena.numpy(3, object)
        with pytest.raises(UsageError, match="0 bytes"):
            arena.buffer(0)
        assert arena.numpy((0, 4), np.int8).shape == (0, 4)


def test_elsewhere_than_on_linux_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="only Linux"):
        Arena(4096)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_sandbox_that_refuses_memfd_create_is_named(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(OSError, match="memfd_create: ") as caught:
        Arena(1)
    assert "allow memfd_create in the sandbox's profile" in with_remedy(caught.value)


def test_it_is_not_unmapped_under_an_array() -> None:
    arena = Arena(4096)
    array = arena.numpy(4, np.int64)
    with pytest.raises(UsageError, match="still referenced"):
        arena.close()
    array[:] = 3
    assert array.sum() == 12
    del array
    arena.close()
    arena.close()
    assert arena.closed
    with pytest.raises(UsageError, match="it is closed"):
        arena.buffer(1)
    with pytest.raises(UsageError, match="it is closed"):
        arena.fileno()


def test_an_exception_is_not_hidden_by_arrays_that_its_frames_hold() -> None:
    arena = Arena(4096)
    array = arena.numpy(4, np.int64)
    with pytest.raises(ZeroDivisionError), arena:
        raise ZeroDivisionError
    assert arena.closed
    array[:] = 3
    assert array.sum() == 12


def test_released_memory_goes_with_its_last_array() -> None:
    arena = Arena(4096, name="released-memory")
    array = arena.numpy(4, np.int64)
    part = array[2:]
    descriptor = arena.fileno()
    assert not arena.release()
    assert arena.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert arena_at(arena.address, arena.address + 1) is None
    with pytest.raises(UsageError, match="it is closed"):
        arena.buffer(1)
    arena.close()
    del arena, array
    part[:] = 3
    assert part.sum() == 6
    assert "released-memory" in Path("/proc/self/maps").read_text()
    del part
    assert "released-memory" not in Path("/proc/self/maps").read_text()
    assert Arena(4096).release()


def test_who_has_the_descriptor_can_map_it_and_only_read() -> None:
    with Arena(8192) as arena:
        array = arena.numpy(8192, np.uint8)
        theirs = os.open(f"/proc/self/fd/{arena.fileno()}", os.O_RDWR)
        try:
            with mmap.mmap(theirs, 8192, prot=mmap.PROT_READ) as mapped:
                array[100] = 77
                assert mapped[MID_PAGE_BYTES + 100] == 77
            for attempt in (
                lambda: mmap.mmap(theirs, 8192),
                lambda: os.write(theirs, b"x"),
                lambda: os.ftruncate(theirs, 0),
                lambda: os.ftruncate(theirs, 1 << 20),
                lambda: fcntl.fcntl(theirs, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            ):
                with pytest.raises(PermissionError):
                    attempt()
            assert fcntl.fcntl(theirs, fcntl.F_GET_SEALS) & SEALS == SEALS
        finally:
            os.close(theirs)
        del array


def test_huge_pages_fit_both_mappings() -> None:
    """The kernel gives such an address to a file only where all of them have some."""
    with Arena(1 << 20) as arena:
        theirs = SharedMapping(arena.fileno(), 1 << 20, writable=False)
        assert {arena.address % HUGE_PAGE_BYTES, theirs.address % HUGE_PAGE_BYTES} == {
            0
        }
        arena.numpy(9, np.uint8)[:] = 7
        seen = theirs.array(MID_PAGE_BYTES, 9)
        assert seen.tolist() == [7] * 9
        assert not seen.flags.writeable
        del seen
        theirs.close()
        assert theirs.closed


def test_all_pages_of_a_populated_arena_are_there() -> None:
    with Arena(16 << 20, populate=True) as arena:
        array = arena.buffer(16 << 20)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert not array.any()
        array[:] = 1
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < array.size // mmap.PAGESIZE // 8
        del array


def test_it_may_be_larger_than_memory_until_it_is_written_to() -> None:
    with Arena(8 * mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES")) as arena:
        array = arena.numpy(9, np.uint8)
        array[:] = 7
        assert array.tolist() == [7] * 9
        del array


def test_where_addresses_count_as_memory_it_lies_where_the_kernel_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With vm.overcommit_memory=2 a reservation has to fit into what is left."""
    real = mmap.mmap

    def strict(fd: int, length: int, **more: int) -> mmap.mmap:
        if fd == -1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(fd, length, **more)

    monkeypatch.setattr(mmap, "mmap", strict)
    with Arena(1 << 20, populate=True) as arena:
        theirs = SharedMapping(arena.fileno(), 1 << 20, writable=False)
        array = arena.numpy(9, np.uint8)
        array[:] = 7
        assert arena_of(as_fragments(array.data)) is arena
        assert theirs.array(MID_PAGE_BYTES, 9).tolist() == [7] * 9
        theirs.close()
        del array


def test_what_cannot_be_mapped_is_an_error() -> None:
    with Path(os.devnull).open("rb") as file, pytest.raises(OSError, match="mmap: "):
        SharedMapping(file.fileno(), mmap.PAGESIZE, writable=False)


def test_a_peer_says_how_large_its_arena_is() -> None:
    """The kernel lets it be of any size."""
    theirs = os.memfd_create("theirs")
    try:
        for nbytes in (0, 2**62, 2**63 - 1):
            os.ftruncate(theirs, nbytes)
            with pytest.raises(OSError, match=r"Cannot allocate|Invalid argument"):
                SharedMapping(theirs, nbytes, writable=False)
    finally:
        os.close(theirs)


def test_memory_is_found_in_its_arena() -> None:
    with Arena(1 << 16) as one, Arena(1 << 16) as two:
        assert one.serial != two.serial
        for arena in (one, two):
            array = arena.numpy(1000, np.uint8)
            assert arena_of(as_fragments(array.data)) is arena
            assert array.ctypes.data == arena.address + MID_PAGE_BYTES
            del array
        across, beyond = (
            Fragments(
                np.array(addresses, np.uint64),
                np.array(lengths, np.uint64),
                owner=None,
                writable=False,
            )
            for addresses, lengths in (
                ([one.address, two.address], [10, 10]),
                ([one.address], [one.nbytes + mmap.PAGESIZE + 1]),
            )
        )
        assert arena_of(across) is None
        assert arena_of(beyond) is None
        ordinary = np.zeros(64, np.uint8)
        assert arena_of(as_fragments(ordinary.data)) is None
    assert arena_of(across) is None


def test_a_refusal_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(open_descriptors())

    def refuse(*_: object) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(PermissionError, match="not here"):
        Arena(4096)
    gc.collect()
    assert len(open_descriptors()) == before
