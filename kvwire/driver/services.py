"""The services that all parts of a communicator share: loop, memory, threads, counters.

A communicator creates one :class:`Services`. Its connections, lanes and transfers use
this object instead of the communicator, so that they do not depend on the rooms above.
"""

from __future__ import annotations

import asyncio

from kvwire.aio import LoopThread
from kvwire.backend import Backend, registry
from kvwire.backend.selection import Selection
from kvwire.config import Config
from kvwire.driver.buffers import BufferTable
from kvwire.driver.codec_threads import CodecThreads
from kvwire.driver.counters import Counters
from kvwire.driver.devices import Devices
from kvwire.driver.trace_ring import TraceRing
from kvwire.limits import SPAN_BYTES_MAX
from kvwire.security.tls import CredentialFiles
from kvwire.security.validity import Validity


class Services:
    """The shared parts of one communicator, on the loop on which it is created.

    Args:
        config: The communicator's configuration.
        tls: The communicator's certificate and key, if trust is ``mtls``.

    Attributes:
        config: The communicator's configuration.
        loop: The event loop that it belongs to.
        thread: Refuses calls from other threads, loops and processes.
        buffers: The memory that users have lent.
        counters: Counts since the communicator was opened.
        devices: Streams and threads for devices with lent memory.
        codec_threads: Threads that encode and decode for transfers with a codec.
        tls: The communicator's certificate and key; None unless trust is ``mtls``.
        ring: Records events for ``kvwire trace``; None unless ``inspect`` is set.
    """

    def __init__(self, config: Config, tls: CredentialFiles | None) -> None:
        self.config = config
        self.thread: LoopThread = LoopThread()
        self.loop: asyncio.AbstractEventLoop = self.thread.loop
        self.buffers: BufferTable = BufferTable()
        self.counters: Counters = Counters()
        self.devices: Devices = Devices(
            self.loop, max(config.chunk_bytes, SPAN_BYTES_MAX)
        )
        self.codec_threads: CodecThreads = CodecThreads()
        self.ring: TraceRing | None = None
        self.tls = tls
        self._backends: dict[str, Backend] = {}
        self._selections: dict[str, Selection] = {}

    @property
    def certificate(self) -> Validity | None:
        """The validity of the certificate and its CA in ``mtls`` mode. Thread-safe."""
        return None if self.tls is None else self.tls.current().validity

    def backend(self, name: str) -> Backend:
        """Return the backend with this name; all connections share it.

        Raises:
            BackendUnavailable: It is not installed.
        """
        if name not in self._backends:
            backend = registry.load(name)()
            if self.tls is not None and backend.capabilities.tls:
                backend.use_tls(self.tls)
            self._backends[name] = backend  # bounded: BACKENDS_MAX
        return self._backends[name]

    def selection(self, scheme: str) -> Selection:
        """Return the choice of transports beside the links of a scheme.

        Raises:
            BackendUnavailable: The scheme carries no control links here.
        """
        found = self._selections.get(scheme)
        if found is None:
            found = Selection(self.config, scheme)
            found.require()
            self._selections[scheme] = found  # bounded: BACKENDS_MAX
        return found

    async def close(self) -> None:
        """End the threads, streams and backends, which no connection uses any more.

        Cancel safety: safe, call it again to end the rest.
        """
        # After this, transfers that were still being decoded have their outcomes.
        await self.codec_threads.close()
        self.devices.close()
        for backend in self._backends.values():
            await backend.aclose()
