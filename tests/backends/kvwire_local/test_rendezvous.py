"""How the sides of a lane meet: strangers, clients that leave, and a wait that ends."""

from __future__ import annotations

import asyncio
import socket
import uuid
from pathlib import Path
from typing import Any

import pytest

from kvwire.errors import BackendUnavailable
from kvwire.types import OneSidedWindows, Role
from kvwire_local.rendezvous import Host, Rendezvous
from kvwire_local.shared_arenas import ReadMethod

SECRET = bytes(32)


def rendezvous(role: Role, windows: OneSidedWindows = "user") -> Rendezvous:
    return Rendezvous(role, SECRET, ReadMethod.MEMORY | ReadMethod.ARENA, None, windows)


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


BOOT = uuid.UUID("a5a5a5a5-0000-4000-8000-000000000001").bytes
OTHER_BOOT = uuid.UUID("5b5b5b5b-0000-4000-8000-000000000002").bytes


def test_a_process_is_where_it_is() -> None:
    here = Host.here()
    here.require_same(Host.here())
    assert Host.decode(here.encode()) == here


def test_another_host_is_said_with_both_boot_ids() -> None:
    with pytest.raises(BackendUnavailable, match=r"5b5b5b5b, here a5a5a5a5"):
        Host(BOOT, 1).require_same(Host(OTHER_BOOT, 1))


def test_another_network_namespace_is_said_with_the_remedy() -> None:
    with pytest.raises(BackendUnavailable, match=r"\(2, here 1\); run both containers"):
        Host(BOOT, 1).require_same(Host(BOOT, 2))


@pytest.mark.parametrize("content", [None, "", "not a uuid\n"])
def test_a_system_that_does_not_say_where_it_is_has_no_local(
    content: str | None,
    tmp_path: Path,
) -> None:
    """No /proc at all, or one with something else in it."""
    boot_id = tmp_path / "boot_id"
    if content is not None:
        boot_id.write_text(content)
    with pytest.raises(BackendUnavailable, match="does not identify this host"):
        Host.here(boot_id)


def test_without_a_network_namespace_there_is_no_local(
    tmp_path: Path,
) -> None:
    with pytest.raises(BackendUnavailable, match="does not identify this host"):
        Host.here(network=tmp_path / "net")
