"""Who fills which blocks, in any order of calls."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.store.index import as_keys
from kvwire.store.operations.in_flight import InFlightFills

_names = st.sets(st.binary(min_size=1, max_size=2), max_size=5)


@given(begun=st.lists(_names, max_size=6), asked=_names, data=st.data())
@settings(max_examples=100)
def test_a_key_is_busy_from_its_begin_to_its_end(
    begun: list[set[bytes]], asked: set[bytes], data: st.DataObject
) -> None:
    in_flight = InFlightFills()
    open_: list[list[bytes]] = []
    for keys in begun:
        busy = {key for one in open_ for key in one}
        free = sorted(keys - busy)
        in_flight.begin(as_keys(free))
        open_.append(free)
        if data.draw(st.booleans()):
            in_flight.end(as_keys(open_.pop(data.draw(st.integers(0, len(open_) - 1)))))
        busy = {key for one in open_ for key in one}
        wanted = sorted(asked | keys)
        assert in_flight.busy(as_keys(wanted)).tolist() == [k in busy for k in wanted]
        assert len(in_flight) == len(busy)


async def test_all_who_wait_for_one_of_the_keys_are_woken_at_the_end() -> None:
    in_flight, keys = InFlightFills(), as_keys([b"a", b"b"])
    in_flight.begin(keys)
    in_flight.begin(as_keys([b"c"]))
    waiting = [asyncio.create_task(in_flight.ended(key)) for key in (b"a", b"a", b"b")]
    other = asyncio.create_task(in_flight.ended(b"c"))
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False, False]
    in_flight.end(keys)
    await asyncio.gather(*waiting[1:])
    assert not other.done()
    in_flight.end(as_keys([b"c"]))
    await other
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def test_what_nobody_fills_is_not_waited_for() -> None:
    in_flight = InFlightFills()
    await in_flight.ended(b"a")
    in_flight.begin(as_keys([b"a"]))
    in_flight.end(as_keys([b"a"]))
    await in_flight.ended(b"a")
    assert len(in_flight) == 0


async def test_a_key_that_is_filled_again_is_another_wait() -> None:
    """Who was woken looks again, and finds it busy."""
    in_flight, keys = InFlightFills(), as_keys([b"a"])
    in_flight.begin(keys)
    first = asyncio.create_task(in_flight.ended(b"a"))
    await asyncio.sleep(0)
    in_flight.end(keys)
    in_flight.begin(keys)
    await first
    assert in_flight.busy(keys).all()
    in_flight.end(keys)


def test_ending_what_was_not_begun_is_an_error() -> None:
    with pytest.raises(KeyError):
        InFlightFills().end(as_keys([b"a"]))
