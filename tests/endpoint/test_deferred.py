"""A request to a peer that is not connected yet ends whatever becomes of connecting."""

from __future__ import annotations

import pytest

from kvwire import KVWireError, Request
from kvwire.aio import LoopThread
from kvwire.endpoint.connection import ConnectionState
from kvwire.endpoint.deferred import DeferredRequest
from kvwire.endpoint.request import RequestState


async def test_an_error_that_is_not_ours_ends_it_too() -> None:
    async def connect() -> ConnectionState:
        raise LookupError("a directory's bug")

    def call(_: ConnectionState) -> RequestState[int]:
        raise AssertionError("there is no connection")

    deferred = DeferredRequest(
        LoopThread(), connect, call, waits_for=str, deadline=None, receives=False
    )
    with pytest.raises(KVWireError, match="a directory's bug") as caught:
        await Request(deferred.outer)
    assert isinstance(caught.value.__cause__, LookupError)
