"""Connecting: what fails, what is cancelled, what the backend says of itself."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvwire.types import Address
from kvwire_tcp import TcpBackend
from kvwire_tcp import backend as backend_module


def test_a_platform_without_scatter_and_gather_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend_module, "_REQUIRED", ("sendmsg", "no_such_call"))
    availability = TcpBackend.availability()
    assert not availability.available
    assert "no_such_call" in availability.reason
    assert "sendmsg" not in availability.reason
    assert "WSL" in availability.remedy


@pytest.mark.parametrize("host", ["", "no such host", "localhost"])
async def test_a_host_that_is_no_numeric_address(host: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - each has its own number and text
        await TcpBackend().connect(Address("tcp", host, 1))


async def test_a_link_is_never_connected_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = unused.getsockname()

    class Bound(socket.socket):
        """As if the kernel had chosen the very port that is asked for."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.bind(address)

    monkeypatch.setattr(socket, "socket", Bound)
    with pytest.raises(ConnectionRefusedError):
        await TcpBackend().connect(Address("tcp", *address))
