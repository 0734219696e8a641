"""Synchronous access to a communicator, which runs on its own I/O thread.

For engines that are not asyncio programs: a scheduler's step loop, a worker's forward
pass. Marks are handed over without waiting; a wait blocks the calling thread on a lock
instead of polling; an idle engine costs no CPU.

Everything may be called from any thread but the engine's own. Some values (an outcome,
the landed layers) are read without asking the loop. They only ever change from unknown
to known, so an answer may be out of date but never wrong.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from kvwire.config import Config, ConfigOptions
from kvwire.directory import Record
from kvwire.directory.limits import MEMBER_LEASE_S
from kvwire.endpoint.communicator import Communicator
from kvwire.endpoint.communicator import open as open_communicator
from kvwire.endpoint.connection import Connection
from kvwire.endpoint.snapshot import Snapshot
from kvwire.engine.ends import (
    EngineConnection,
    EngineIncoming,
    EngineOutgoing,
    EnginePeer,
    EngineRegion,
    EngineWindow,
)
from kvwire.engine.io_thread import IOThread, bind_thread
from kvwire.kv.blocks import Blocks
from kvwire.kv.paged import PagedCache
from kvwire.memory.buffers import Memory
from kvwire.transfers.options import PublishOptions, ReceiveOptions
from kvwire.types import Access, AccessName, Address, Uncopied

T = TypeVar("T")
# Time for closing directories and transports, after a communicator's connections.
_CLOSE_SLACK_S: Final = 30.0


class Engine(Uncopied):
    """Runs a communicator on its own thread; any thread may call it.

    Once a send, recv, put or get has returned or raised, nothing touches its memory any
    more, with two exceptions: a second interrupt is raised at once, and calls end with
    the engine even if a transport has not released their memory (see :meth:`close`).

    Args:
        config: A Config, the path of a TOML file, or None for the environment alone.
        **arguments: Keys of Config that override ``config``.

    Raises:
        UsageError: The configuration cannot be used.
    """

    def __init__(
        self,
        config: Config | str | os.PathLike[str] | None = None,
        **arguments: Unpack[ConfigOptions],
    ) -> None:
        self._thread = IOThread("kvwire-engine")
        try:
            self._thread.begin()
            self._communicator = self._thread.call(
                _opened(self._thread, config, arguments)
            )
        except BaseException:
            self._thread.close()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._thread.ended else self._communicator
        return f"<Engine {state}>"

    def __del__(self) -> None:
        # If the constructor fails, it has closed everything that it had created.
        if hasattr(self, "_communicator") and self._thread.begin_close():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)

    @property
    def config(self) -> Config:
        """Return its configuration."""
        return self._communicator.config

    @property
    def name(self) -> str:
        """Return the name that peers see."""
        return self._communicator.name

    @property
    def closed(self) -> bool:
        """Whether it is closing, or closed."""
        return self._thread.ended or self._communicator.closed

    def listen(self, address: str | Address) -> Address:
        """Accept connections on an address; :meth:`accept` returns them.

        Returns:
            The bound address, with the real port.

        Raises:
            ClosedOK: The engine is closed.
            KVWireError: As :meth:`kvwire.Communicator.listen`.
        """
        return self._thread.call(self._communicator.listen(address))

    def connect(
        self,
        address: str | Address,
        *,
        transport: str | Iterable[str] | None = None,
        timeout_s: float | None = None,
    ) -> EngineConnection:
        """Connect to a listening communicator or engine, and wait for the connection.

        Args:
            address: Where it listens.
            transport: A required transport, or several in order of preference.
            timeout_s: Seconds until the connection must be usable; None for the
                configured ``handshake_timeout_s``.

        Raises:
            ClosedOK: The engine is closed.
            KVWireError: As :meth:`kvwire.Communicator.connect`.
        """
        connection = self._thread.call(
            self._communicator.connect(
                address, transport=transport, timeout_s=timeout_s
            )
        )
        return EngineConnection(self, self._thread, connection)

    def accept(self, timeout: float | None = None) -> EngineConnection:
        """Wait for the next inbound connection.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Raises:
            TimeoutError: No connection came in time; none is lost.
            ClosedOK: The engine was closed.
        """
        # The timeout is on the loop, so that no connection is taken and then lost.
        connection = self._thread.call(_accepted(self._communicator, timeout))
        return EngineConnection(self, self._thread, connection)

    def snapshot(self) -> Snapshot:
        """Return the open connections, transfers and stores, as plain values."""
        return self._thread.run(self._communicator.snapshot)

    def publish(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[PublishOptions],
    ) -> EngineOutgoing:
        """Offer a transfer to the peer that pulls its id; does not wait for the peer.

        Arguments, options and errors are those of :meth:`kvwire.Communicator.publish`.
        """
        return EngineOutgoing(
            self,
            self._thread,
            self._thread.run(
                lambda: self._communicator.publish(id, cache, blocks, **options)
            ),
        )

    def expect(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> EngineIncoming:
        """Receive a transfer that a peer pushes; does not wait for it.

        Arguments, options and errors are those of :meth:`kvwire.Communicator.expect`.
        """
        return EngineIncoming(
            self,
            self._thread,
            self._thread.run(
                lambda: self._communicator.expect(id, cache, blocks, **options)
            ),
        )

    def expose(
        self,
        name: str,
        memory: PagedCache | Memory,
        *,
        block_bytes: int | None = None,
    ) -> EngineWindow:
        """Let peers read blocks without asking.

        Arguments and errors are those of :meth:`kvwire.Communicator.expose`.
        """
        communicator = self._communicator
        return EngineWindow(
            self,
            self._thread,
            self._thread.run(
                lambda: communicator.expose(name, memory, block_bytes=block_bytes)
            ),
        )

    def register(
        self, buffer: Memory, access: AccessName | Access = "read"
    ) -> EngineRegion:
        """Lend memory to peers; each peer needs a grant to reach it.

        Arguments and errors are those of :meth:`kvwire.Communicator.register`.
        """
        communicator = self._communicator
        region = self._thread.run(lambda: communicator.register(buffer, access))
        return EngineRegion(self, self._thread, region)

    def peer(self, where: str | Record) -> EnginePeer:
        """Return the peer at an address, or one that a directory selector matches.

        It is dialled on first use, and again after its connection has ended. Arguments
        and errors are those of :meth:`kvwire.Communicator.peer`.
        """
        peer = self._thread.run(lambda: self._communicator.peer(where))
        return EnginePeer(self, self._thread, peer)

    def members(self, selector: str = "") -> tuple[Record, ...]:
        """Return the other members of the directory that match a selector.

        Waits for the first answer of the directory. Arguments and errors are those of
        :meth:`kvwire.Communicator.members`.
        """
        return self._thread.call(self._communicator.members(selector))

    def announce(
        self,
        *,
        role: str = "",
        model: str = "",
        cache: PagedCache | None = None,
        labels: Mapping[str, str] | None = None,
        load: float = 0.0,
        address: str | Address | None = None,
        lease_s: float = MEMBER_LEASE_S,
    ) -> None:
        """Announce this engine in its configured directory; does not wait for that.

        Arguments and errors are those of :meth:`kvwire.Communicator.announce`.
        """
        self._thread.run(
            lambda: self._communicator.announce(
                role=role,
                model=model,
                cache=cache,
                labels=labels,
                load=load,
                address=address,
                lease_s=lease_s,
            )
        )

    def withdraw(self) -> None:
        """Withdraw the announcement, so that no new peer finds this engine.

        Connections stay open. Never raises because of the directory.
        """
        self._thread.call(self._communicator.withdraw())

    def start(
        self, work: Callable[[Communicator], Coroutine[Any, Any, T]]
    ) -> concurrent.futures.Future[T]:
        """Run a coroutine on the engine's loop without waiting for it.

        Use it for work in several steps, such as connecting and then pulling. The
        coroutine may use the whole communicator; any thread may read the result.

        Args:
            work: Called with the communicator, on the calling thread; the coroutine
                that it returns runs on the loop.

        Raises:
            UsageError: From the engine's own thread, or after a fork.
            ClosedOK: The engine is closed.
        """
        return self._thread.start(work(self._communicator))

    def abort(self) -> None:
        """End every connection now; does not wait. ``close`` waits for the remains.

        In a forked child it does nothing.
        """
        if not self._thread.forked:
            self._thread.post(self._communicator.abort)

    def close(self) -> None:
        """End every transfer and connection, then the thread.

        Takes about ``close_timeout_s`` at most. Transfers in flight end with an
        outcome, which threads waiting for it receive; other calls fail with
        :exc:`~kvwire.ClosedOK`. It may be called repeatedly and from several threads:
        each call returns once everything has ended. In a forked child it does nothing.

        If a transport never releases memory, the calls that wait for this memory also
        end after that time, with ClosedOK or with their interrupt. The transport may
        then still use the memory: do not reuse it in this process.

        Raises:
            UsageError: From the engine's own thread.
        """
        self._thread.close()

    def __enter__(self) -> Self:
        """Return the engine; it is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it, or abort if an exception left the block."""
        if error is not None:
            self.abort()
        self.close()


async def _opened(
    thread: IOThread,
    config: Config | str | os.PathLike[str] | None,
    arguments: ConfigOptions,
) -> Communicator:
    opening = open_communicator(config, **arguments)
    bind_thread(opening.config.io_cpus)
    communicator = await opening
    # Registered early, because an interrupt may keep the caller from getting it.
    within_s = 2 * opening.config.close_timeout_s + _CLOSE_SLACK_S
    thread.at_end(communicator.close, within_s)
    return communicator


async def _accepted(communicator: Communicator, timeout: float | None) -> Connection:
    try:
        async with asyncio.timeout(timeout):
            return await communicator.accept()
    except TimeoutError:
        raise TimeoutError(f"no connection within {timeout:g} s") from None
