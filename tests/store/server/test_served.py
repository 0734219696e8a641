"""Berths: how many at once, and which of them may be used again."""

from __future__ import annotations

import asyncio

import pytest

from kvwire.limits import MIB
from kvwire.store.server.served import Berth, TransferBuffers


async def test_a_berth_that_was_given_back_is_used_again() -> None:
    berths = TransferBuffers(2, MIB)
    async with berths.one() as first, berths.one() as second:
        assert first.nbytes == second.nbytes == MIB
        assert first is not second
    async with berths.one() as again:
        assert any(again is one for one in (first, second))


@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError])
async def test_a_berth_that_something_may_touch_is_used_by_nobody(
    error: type[BaseException],
) -> None:
    """There is another one in its place, so a client goes on."""
    berths, left = TransferBuffers(1, 8), []

    async def fails() -> Berth:
        async with berths.one() as berth:
            left.append(berth)
            raise error

    with pytest.raises(error):
        await fails()
    async with berths.one() as other:
        assert other is not left[0]
    async with berths.one() as again:
        assert again is other
