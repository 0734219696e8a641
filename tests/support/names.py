"""Names of a test's own, looked up on its loop in place of the system's."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest


class Zone:
    """What the resolver says of every name: these addresses, or an error of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.hosts = [*hosts]
        self.error = 0
        self.asked = 0
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, **__: Any) -> list[Any]:
        self.asked += 1
        if self.error:
            raise socket.gaierror(self.error, "said so")
        return [
            socket.getaddrinfo(one, port, type=socket.SOCK_STREAM)[0]
            for one in self.hosts
        ]
