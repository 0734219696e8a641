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
    filling = InFlightFills()
    open_: list[list[bytes]] = []
    for keys in begun:
        busy = {key for one in open_ for key in one}
        free = sorted(keys - busy)
        filling.begin(as_keys(free))
        open_.append(free)
        if data.draw(st.booleans()):
            filling.end(as_keys(open_.pop(data.draw(st.integers(0, len(open_) - 1)))))
        busy = {key for one in open_ for key in one}
        wanted = sorted(asked | keys)
        assert filling.busy(as_keys(wanted)).tolist() == [k in busy for k in wanted]
        assert len(filling) == len(busy)


async def test_all_who_wait_for_one_of_the_keys_are_woken_at_the_end() -> None:
    filling, keys = InFlightFills(), as_keys([b"a", b"b"])
    filling.begin(keys)
    filling.begin(as_keys([b"c"]))
    waiting = [asyncio.create_task(filling.ended(key)) for key in (b"a", b"a", b"b")]
    other = asyncio.create_task(filling.ended(b"c"))
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False, False]
    filling.end(keys)
    await asyncio.gather(*waiting[1:])
    assert not other.done()
    filling.end(as_keys([b"c"]))
    await other
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def test_what_nobody_fills_is_not_waited_for() -> None:
    filling = InFlightFills()
    await filling.ended(b"a")
    filling.begin(as_keys([b"a"]))
    filling.end(as_keys([b"a"]))
    await filling.ended(b"a")
    assert len(filling) == 0


async def test_a_key_that_is_filled_again_is_another_wait() -> None:
    """Who was woken looks again, and finds it busy."""
    filling, keys = InFlightFills(), as_keys([b"a"])
    filling.begin(keys)
    first = asyncio.create_task(filling.ended(b"a"))
    await asyncio.sleep(0)
    filling.end(keys)
    filling.begin(keys)
    await first
    assert filling.busy(keys).all()
    filling.end(keys)


def test_ending_what_was_not_begun_is_an_error() -> None:
    with pytest.raises(KeyError):
        InFlightFills().end(as_keys([b"a"]))
