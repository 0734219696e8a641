"""What lasts as long as a connection does not keep the variables of who dialled it."""

from __future__ import annotations

import asyncio
import gc
from contextvars import Context, ContextVar

import pytest

import kvwire
from kvwire.aio import start_task
from tests.support.caches import Memory
from tests.support.pairs import turns

# Callbacks of another loop are not the collector's to find.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
REQUEST: ContextVar[str] = ContextVar("REQUEST")
WAYS = {
    "tcp": "tcp://127.0.0.1:0",
    "local": "tcp://127.0.0.1:0",
    "inproc": "inproc://context",
}


def keepers() -> list[object]:
    """Callbacks and tasks that still have the variable; those cancelled end by time."""
    gc.collect()
    contexts = [c for c in gc.get_objects() if isinstance(c, Context) and REQUEST in c]
    return [
        one
        for context in contexts
        for one in gc.get_referrers(context)
        if isinstance(one, asyncio.Handle | asyncio.Future) and not one.cancelled()
    ]


@pytest.mark.parametrize("found", ["by connect", "as a peer"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_request_that_dials_is_forgotten_when_it_is_over(
    way: str, found: str
) -> None:
    async with (
        kvwire.open(name="a", require=[way]) as here,
        kvwire.open(name="b", require=[way]) as there,
    ):
        where = await there.listen(WAYS[way])
        mine, theirs = Memory().cache, Memory().cache
        peer = here.peer(str(where))

        async def request() -> kvwire.Connection:
            REQUEST.set("its name")
            by_peer = found == "as a peer"
            connection = await (peer.connect() if by_peer else here.connect(where))
            out = there.publish(1, theirs, [0, 1])
            out.ready(layers=slice(0, 4))
            out.finish()
            assert (await connection.pull(1, mine, [0, 1])).complete
            await connection.send(1, b"a message")
            return connection

        connection = await start_task(request())
        await turns(50)  # what is still under way ends
        assert not keepers()
        assert not connection.closed
