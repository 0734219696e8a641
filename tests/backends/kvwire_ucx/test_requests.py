"""Operations: told once each, and memory is kept until then."""

from __future__ import annotations

import gc
import weakref
from typing import cast

from kvwire_ucx.binding import ERR_CANCELED, OK
from kvwire_ucx.library import Ucp
from kvwire_ucx.requests import UcxRequests

PENDING = 0x5500_0000_1000


class Library:
    """What of libucp the requests call."""

    def __init__(self) -> None:
        self.freed: list[int] = []

    def request_free(self, handle: int) -> None:
        self.freed.append(handle)


class Bytes(bytearray):
    """A buffer that can be watched."""


def made() -> tuple[UcxRequests, Library, list[tuple[str, int, int]]]:
    library = Library()
    return UcxRequests(cast("Ucp", library)), library, []


def test_what_is_done_at_once_is_told_later() -> None:
    requests, library, told = made()
    request = requests.new(lambda *how: told.append(("a", *how)))
    requests.posted(request, None)
    assert not told
    assert requests.over
    requests.tell()
    assert told == [("a", OK, 0)]
    assert len(requests) == 0
    assert library.freed == []


def test_what_is_refused_is_told_the_same_way() -> None:
    requests, _, told = made()
    requests.posted(requests.new(lambda *how: told.append(("a", *how))), 2**64 - 16)
    requests.tell()
    assert told == [("a", ERR_CANCELED, 0)]


def test_what_is_pending_is_told_when_ucx_says_so_and_freed() -> None:
    requests, library, told = made()
    request = requests.new(lambda *how: told.append(("a", *how)))
    requests.posted(request, PENDING)
    requests.tell()
    assert not told
    requests.on_sent(PENDING, OK, request.number)
    requests.tell()
    requests.tell()
    assert told == [("a", OK, 0)]
    assert library.freed == [PENDING]


def test_memory_is_kept_until_it_is_over() -> None:
    requests, _, _ = made()
    buffer = Bytes(10)
    watched = weakref.ref(buffer)
    request = requests.new(lambda *_: None, buffer)
    requests.posted(request, PENDING)
    del buffer
    gc.collect()
    assert watched() is not None
    requests.on_sent(PENDING, OK, request.number)
    assert watched() is not None
    requests.tell()
    gc.collect()
    assert watched() is None


def test_what_follows_waits_for_its_own_turn() -> None:
    requests, _, told = made()

    def again(status: int, nbytes: int) -> None:
        told.append(("first", status, nbytes))
        requests.posted(requests.new(lambda *how: told.append(("next", *how))), None)

    requests.posted(requests.new(again), None)
    requests.tell()
    assert [name for name, *_ in told] == ["first"]
    requests.tell()
    assert [name for name, *_ in told] == ["first", "next"]


def test_the_end_of_a_worker_ends_everything_once() -> None:
    requests, library, told = made()
    waiting = requests.new(lambda *how: told.append(("waiting", *how)))
    requests.posted(waiting, PENDING)
    finished = requests.new(lambda *how: told.append(("finished", *how)))
    requests.posted(finished, PENDING + 64)
    requests.on_sent(PENDING + 64, OK, finished.number)
    requests.abandon()
    assert sorted(told) == [("finished", OK, 0), ("waiting", ERR_CANCELED, 0)]
    assert library.freed == []
    assert len(requests) == 0
