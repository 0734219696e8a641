"""The state of a request: one completion, and nothing of an owner that it has not."""

from __future__ import annotations

import asyncio

import pytest

from kvwire import ConnectionLost
from kvwire.endpoint.request import RequestState


async def test_one_that_was_over_at_once_has_nothing_to_wait_for() -> None:
    request = RequestState(over=True, value=7)
    request.cancel()
    request.neglect_if_alone()
    await request.released()
    assert request.result() == 7


def test_one_that_failed_at_once_says_why_each_time() -> None:
    request = RequestState[int](over=True, error=ConnectionLost("cut"))
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="cut"):
            request.result()


def test_one_under_way_has_no_result() -> None:
    with pytest.raises(asyncio.InvalidStateError):
        RequestState[int]().result()


def test_a_second_completion_is_a_bug() -> None:
    request = RequestState(over=True, value=7)
    with pytest.raises(AssertionError, match="completed twice"):
        request.complete(8, None)
    assert request.result() == 7
