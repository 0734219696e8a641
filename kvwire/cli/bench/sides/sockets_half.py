"""Blocking sockets and nothing else: as fast as one stream of Python gets.

No loop, no frame, no credit: ``sendall`` on one side and ``recv_into`` on the other.
The receiving side goes through as many buffers as operations are in flight elsewhere,
since one buffer that stays in the cache is not what anybody receives into.
"""

from __future__ import annotations

import socket
import time
from typing import Any, Final

from kvwire.cli.bench.case import Work
from kvwire.cli.bench.sides.half import HOST, Half, digest, fill

_SIGNAL: Final = b"!"


class SocketsHalf(Half):
    """Two connected sockets; every call blocks the process, which has no other task."""

    _socket: socket.socket
    _listener: socket.socket

    def __init__(self) -> None:
        # By their size; not made anew, so that no round has to fault them in.
        self._parts: dict[int, list[memoryview]] = {}

    async def listen(self) -> dict[str, Any]:
        """See Half."""
        self._listener = socket.create_server((HOST, 0))
        return {"address": self._listener.getsockname()[1]}

    async def accept(self) -> dict[str, Any]:
        """See Half."""
        self._socket, _ = self._listener.accept()
        return {}

    async def connect(self, address: Any) -> dict[str, Any]:
        """See Half."""
        self._socket = socket.create_connection((HOST, address))
        return {}

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half."""
        part = self._memory(work)[0]
        if work.verb == "get":
            self._fill_from_socket(part)
            return {"digest": digest(part)}
        sent = fill(part)
        self._socket.sendall(part)
        return {"digest": sent}

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        part = self._memory(work)[0]
        if work.verb == "get":
            sent = fill(part)
            self._socket.sendall(part)
            return {"digest": sent}
        self._fill_from_socket(part)
        return {"digest": digest(part)}

    async def drive(self, work: Work) -> dict[str, Any]:
        """See Half."""
        self._wait()
        began = time.perf_counter()
        if work.verb == "get":
            self._receive(work)
        else:
            self._send(work)
            self._wait()
        elapsed_s = time.perf_counter() - began
        return {"values": [work.count * work.nbytes / elapsed_s]}

    async def serve(self, work: Work) -> dict[str, Any]:
        """See Half."""
        self._socket.sendall(_SIGNAL)
        if work.verb == "get":
            self._send(work)
        else:
            self._receive(work)
            self._socket.sendall(_SIGNAL)
        return {}

    async def close(self) -> None:
        """See Half."""
        for name in ("_socket", "_listener"):
            if hasattr(self, name):
                getattr(self, name).close()

    def _send(self, work: Work) -> None:
        part = self._memory(work)[0]
        for _ in range(work.count):
            self._socket.sendall(part)

    def _receive(self, work: Work) -> None:
        parts = self._memory(work)
        for number in range(work.count):
            self._fill_from_socket(parts[number % work.in_flight])

    def _memory(self, work: Work) -> list[memoryview]:
        if work.nbytes not in self._parts:
            self._parts[work.nbytes] = [
                memoryview(bytearray(work.nbytes)) for _ in range(work.in_flight)
            ]
        return self._parts[work.nbytes]

    def _fill_from_socket(self, part: memoryview) -> None:
        have = 0
        while have < len(part):
            have += self._read(part[have:])

    def _wait(self) -> None:
        self._read(memoryview(bytearray(len(_SIGNAL))))

    def _read(self, into: memoryview) -> int:
        count = self._socket.recv_into(into)
        if not count:
            raise ConnectionError("the other half has ended")
        return count
