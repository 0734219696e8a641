"""How the sides of a lane meet: strangers, clients that leave, and a wait that ends."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvwire.types import Role
from kvwire_local.rendezvous import Rendezvous
from kvwire_local.sent_payloads import ReadMethod
from kvwire_local.tracer_slot import tracers

SECRET = bytes(32)


def rendezvous(role: Role) -> Rendezvous:
    return Rendezvous(
        role, SECRET, ReadMethod.MEMORY | ReadMethod.ARENA, tracers(), "none"
    )


@pytest.mark.parametrize("clients", [1, 3])
async def test_a_client_that_comes_as_the_wait_is_cancelled(clients: int) -> None:
    """No error in a callback of the loop, and no socket that nobody closes."""
    loop, wrong = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    server = rendezvous(Role.SERVER)
    with server.listen() as listener:
        waiting = asyncio.create_task(server.wait(listener))
        await asyncio.sleep(0)
        strangers = [socket.socket(socket.AF_UNIX) for _ in range(clients)]
        for stranger in strangers:
            stranger.connect(listener.getsockname())
        loop.call_soon(waiting.cancel)
        await asyncio.wait([waiting])
        assert waiting.cancelled()
    for stranger in strangers:
        stranger.close()
    assert not wrong


async def test_strangers_are_turned_away_and_the_client_is_met() -> None:
    server, client = rendezvous(Role.SERVER), rendezvous(Role.CLIENT)
    with server.listen() as listener:
        waiting = asyncio.create_task(server.wait(listener))
        for word in (b"", b"no greeting", bytes(200)):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(listener.getsockname())
                stranger.sendall(word)
        result = [await client.connect(), await waiting]
    assert all(side.is_read for side in result)
    for side in result:
        side.sock.close()
    server.close()
    client.close()
