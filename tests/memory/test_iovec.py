"""Windows over fragment lists: any limits, any short reads and writes, same bytes."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import socket
import weakref

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.kv.fragments import Fragments
from kvwire.memory.copy import address_of
from kvwire.memory.iovec import IOVECS_MAX, Iovecs, readv, simplest, writev
from tests.memory.fragments import content, scattered

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=40)
TAIL = (4096, 8)  # never read or written here


def random_bytes(lengths: list[int]) -> tuple[Fragments, npt.NDArray[np.uint8]]:
    """Fragments of these lengths with gaps between them, and all of their memory."""
    fragments, memory = scattered(lengths, 1, gap=1)
    memory[:] = np.frombuffer(os.urandom(memory.size), np.uint8)
    return fragments, memory


def bytes_of(rows: list[tuple[int, int]]) -> bytes:
    return b"".join(ctypes.string_at(*row) for row in rows)


def rows(window: tuple[int, int]) -> list[tuple[int, int]]:
    address, count = window
    table = np.frombuffer(ctypes.string_at(address, 16 * count), np.uint64)
    return [(int(base), int(length)) for base, length in table.reshape(count, 2)]


@given(LENGTHS, st.binary(max_size=5), st.data())
def test_windows_cover_the_bytes_once_whatever_is_moved(
    lengths: list[int], head: bytes, data: st.DataObject
) -> None:
    fragments, _ = random_bytes(lengths)
    iovecs = Iovecs(fragments, head)
    left = head + content(fragments)
    while left:
        limit = data.draw(st.integers(1, 30), "limit")
        laid = rows(iovecs.window(limit))
        offered = bytes_of(laid)
        assert all(length for _, length in laid)
        assert iovecs.asked == len(offered) <= limit + len(head)
        assert left.startswith(offered)
        moved = data.draw(st.integers(1, len(offered)), "moved")
        iovecs.rest -= moved
        left = left[moved:]
        assert iovecs.tobytes() == left
        assert len(iovecs) == len(left)


@given(LENGTHS, st.integers(1, 400))
def test_the_tail_follows_only_the_end_of_the_list(
    lengths: list[int], limit: int
) -> None:
    fragments, _ = random_bytes(lengths)
    iovecs = Iovecs(fragments)
    laid = rows(iovecs.window(limit, TAIL))
    assert (laid[-1] == TAIL) == (limit >= fragments.nbytes)
    assert iovecs.asked == sum(length for _, length in laid)


def test_a_window_has_no_more_rows_than_the_kernel_takes() -> None:
    fragments, _ = random_bytes([1] * (3 * IOVECS_MAX))
    iovecs = Iovecs(fragments, b"head")
    assert iovecs.window(iovecs.rest, TAIL)[1] == IOVECS_MAX - 1
    iovecs.rest = IOVECS_MAX - 2
    laid = rows(iovecs.window(iovecs.rest, TAIL))
    assert len(laid) == IOVECS_MAX - 1
    assert laid[-1] == TAIL


@given(LENGTHS, LENGTHS, st.data())
def test_writev_and_readv_move_one_list_onto_another(
    out: list[int], into: list[int], data: st.DataObject
) -> None:
    size = min(sum(out), sum(into))
    source = random_bytes(out)[0].slice(0, size)
    target, memory = random_bytes(into)
    target = target.slice(0, size)
    before, sent = memory.copy(), content(source)
    beside = np.ones(memory.size, np.bool_)
    for row in zip(target.addresses.tolist(), target.lengths.tolist(), strict=True):
        offset = row[0] - memory.ctypes.data
        beside[offset : offset + row[1]] = False
    writing, reading = Iovecs(source), Iovecs(target)
    limits = st.integers(1, 50)
    left, right = socket.socketpair()
    with left, right:
        while writing.rest:
            writing.rest -= writev(left.fileno(), writing.window(data.draw(limits)))
        while reading.rest:
            reading.rest -= readv(right.fileno(), reading.window(data.draw(limits)))
    assert content(target) == sent
    assert (memory[beside] == before[beside]).all()


@given(LENGTHS, st.data())
def test_fill_copies_into_the_next_bytes(
    lengths: list[int], data: st.DataObject
) -> None:
    fragments, _ = random_bytes(lengths)
    iovecs = Iovecs(fragments)
    source = os.urandom(fragments.nbytes)
    while iovecs.rest:
        done = fragments.nbytes - iovecs.rest
        step = data.draw(st.integers(1, iovecs.rest))
        iovecs.fill(memoryview(source)[done : done + step])
    assert content(fragments) == source


def test_errors_come_with_their_number_and_class() -> None:
    window = Iovecs(random_bytes([4])[0])
    left, right = socket.socketpair()
    right.setblocking(False)
    with left, right, pytest.raises(BlockingIOError):
        readv(right.fileno(), window.window(4))
    with pytest.raises(OSError, match="descriptor") as raised:
        writev(-1, window.window(4))
    assert raised.value.errno == errno.EBADF


def test_the_end_of_file_reads_as_0_bytes() -> None:
    left, right = socket.socketpair()
    left.close()
    with right:
        assert readv(right.fileno(), Iovecs(random_bytes([4])[0]).window(4)) == 0


@pytest.mark.parametrize("writable", [False, True])
def test_one_fragment_is_a_view_that_keeps_its_memory_alive(writable: bool) -> None:
    class Owner(bytearray):
        pass

    owner = Owner(b"0123456789")
    alive = weakref.ref(owner)
    place = np.array([address_of(owner) + 2], np.uint64)
    view = simplest(
        Fragments(place, np.array([5], np.uint64), owner=owner, writable=writable)
    )
    del owner
    assert isinstance(view, memoryview)
    assert (view.format, view.readonly, bytes(view)) == ("B", not writable, b"23456")
    assert alive() is not None
    view.release()
    del view
    gc.collect()
    assert alive() is None


def test_other_payloads_stay_as_they_are() -> None:
    two, _ = random_bytes([3, 4])
    view = memoryview(b"abc")
    for payload in (two, view, two.slice(0, 0)):
        assert simplest(payload) is payload
