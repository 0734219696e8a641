"""Answers ``kvwire top`` and ``kvwire trace`` about one communicator, if enabled.

It listens on a Unix socket in a folder that only its user can enter, and that user may
read this process's memory anyway. Clients cannot change anything: a client sends one
line, ``snapshot`` or ``trace``, and gets one line of JSON. Clients and line lengths are
bounded.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvwire.backend import keep_from_children
from kvwire.directory.own_folder import own_folder
from kvwire.driver.trace_ring import close_ring, open_ring
from kvwire.endpoint.links import Links
from kvwire.endpoint.snapshot import snapshot_of
from kvwire.errors import UsageError
from kvwire.limits import SOCKET_PATH_BYTES

# The most clients that watch a process at a time, and the longest line of a request.
INSPECT_CLIENTS_MAX: Final = 8
INSPECT_LINE_BYTES_MAX: Final = 4096

_ENDING: Final = ".sock"


class Inspector:
    """Serves the snapshots and the trace of one communicator, on its loop.

    Attributes:
        path: The path of its socket; None while it does not serve.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._services = links.services
        self.path: Path | None = None
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self) -> None:
        """Start serving snapshots in the folder ``inspect``.

        Raises:
            UsageError: The folder cannot be used.

        Cancel safety: call :meth:`close` to end what had started.
        """
        config = self._services.config
        name = f"{os.getpid()}-{self._links.identity.incarnation.hex()[:8]}"
        path = Path(config.inspect, name + _ENDING)
        if (nbytes := len(os.fsencode(path))) > SOCKET_PATH_BYTES:
            raise UsageError(
                f"inspect={config.inspect!r}: the path of its socket would have "
                f"{nbytes} bytes, and systems allow {SOCKET_PATH_BYTES}; choose a "
                "folder with a shorter path, such as /tmp/kvwire"
            )
        own_folder(path.parent, f"inspect={config.inspect!r}")
        self._services.ring = open_ring(self._services.loop)
        self.path = path
        # Starts serving once close() has something to end.
        self._server = await asyncio.start_unix_server(
            self._serve, path, limit=INSPECT_LINE_BYTES_MAX, start_serving=False
        )
        keep_from_children(self._server, _descriptors)
        await self._server.start_serving()

    async def close(self) -> None:
        """Stop serving snapshots.

        Cancel safety: safe, call it again.
        """
        if self._services.ring is not None:
            close_ring(self._services.loop)
            self._services.ring = None
        if self._server is not None:
            self._server.close()
            self._server = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None
        for writer in self._clients.values():
            writer.transport.abort()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._clients) >= INSPECT_CLIENTS_MAX:
                return
            self._clients[task] = writer  # bounded: INSPECT_CLIENTS_MAX
            while line := await reader.readline():
                writer.write(self._answer(line.strip()) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # the client is gone, or has sent too long a line
        finally:
            self._clients.pop(task, None)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, asked: bytes) -> bytes:
        if asked == b"snapshot":
            return msgspec.json.encode(snapshot_of(self._links))
        ring = self._services.ring
        if asked == b"trace" and ring is not None:
            document = {
                "name": self._services.config.name,
                "pid": os.getpid(),
                "events": list(ring.events),
            }
            return msgspec.json.encode(document)
        return b'{"error":"ask for snapshot or trace"}'


def _descriptors(server: asyncio.Server) -> list[int]:
    return [sock.fileno() for sock in server.sockets]
