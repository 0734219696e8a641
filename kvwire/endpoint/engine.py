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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from kvwire.config import Config, ConfigOptions
from kvwire.driver.io_thread import IOThread, bind_thread
from kvwire.endpoint.communicator import Communicator
from kvwire.endpoint.communicator import open as open_communicator
from kvwire.endpoint.connection import Connection
from kvwire.endpoint.remote_window import RemoteWindow
from kvwire.endpoint.snapshot import Snapshot
from kvwire.endpoint.window import Window
from kvwire.kv.blocks import Blocks
from kvwire.kv.outcome import Outcome
from kvwire.kv.paged import PagedCache
from kvwire.memory.buffers import Memory
from kvwire.transfers.incoming import Incoming
from kvwire.transfers.options import PublishOptions, ReceiveOptions, SendOptions
from kvwire.transfers.outgoing import Outgoing
from kvwire.transfers.ready_log import Which
from kvwire.types import Address, PeerInfo, TransportReport

T = TypeVar("T")
# Time for closing directories and transports, after a communicator's connections.
_CLOSE_SLACK_S: Final = 30.0


class Engine:
    """Runs a communicator on its own thread; any thread may call it.

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
        return EngineConnection(self, connection)

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
        return EngineConnection(self, connection)

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
            self._thread.run(
                lambda: communicator.expose(name, memory, block_bytes=block_bytes)
            ),
        )

    def window(self, where: str, name: str) -> EngineRemoteWindow:
        """Open a window of a peer, and wait until it is open.

        The peer is dialled now. If its connection ends, the next ``get`` dials again.

        Args:
            where: The peer's address, or a selector, as for
                :meth:`kvwire.Communicator.peer`.
            name: The name that the peer passed to ``expose``.

        Raises:
            ClosedOK: The engine is closed.
            KVWireError: As :meth:`kvwire.Peer.window`.
        """
        peer = self._thread.run(lambda: self._communicator.peer(where))
        return EngineRemoteWindow(self, self._thread.call(peer.window(name)))

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

    def close(self) -> None:
        """End every transfer and connection, then the thread.

        Takes about ``close_timeout_s`` at most. Transfers in flight end with an
        outcome, which threads waiting for it receive; other calls fail with
        :exc:`~kvwire.ClosedOK`. It may be called repeatedly and from several threads:
        each call returns once everything has ended. In a forked child it does nothing.

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
        if error is not None and not self._thread.forked:
            self._thread.post(self._communicator.abort)
        self.close()


class EngineConnection:
    """Makes a connection usable from synchronous code."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine = engine  # keep a reference, or it would close
        self._thread = engine._thread
        self._connection = connection

    def __repr__(self) -> str:
        return repr(self._connection)

    @property
    def peer(self) -> PeerInfo:
        """Return the peer's name, address and identity."""
        return self._connection.peer

    @property
    def transport(self) -> str:
        """Return the name of the transport that carries its data."""
        return self._connection.transport

    @property
    def transport_report(self) -> TransportReport:
        """Return the considered transports, and why each was or was not chosen."""
        return self._connection.transport_report

    def pull(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> EngineIncoming:
        """Request a transfer that the peer publishes; does not wait for it.

        Arguments, options and errors are those of :meth:`kvwire.Connection.pull`.
        """
        pull = self._connection.pull
        return EngineIncoming(
            self._engine,
            self._thread.run(lambda: pull(id, cache, blocks, **options)),
        )

    def push(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[SendOptions],
    ) -> EngineOutgoing:
        """Send the peer a transfer that it expects; does not wait for it.

        Arguments, options and errors are those of :meth:`kvwire.Connection.push`.
        """
        push = self._connection.push
        return EngineOutgoing(
            self._engine,
            self._thread.run(lambda: push(id, cache, blocks, **options)),
        )

    def window(self, name: str) -> EngineRemoteWindow:
        """Open a window of the peer, and wait until it is open.

        Raises:
            KVWireError: As :meth:`kvwire.Connection.window`.
        """
        opened = self._thread.call(self._connection.window(name))
        return EngineRemoteWindow(self._engine, opened)

    def close(self) -> None:
        """Close the connection gracefully, and wait until it has ended."""
        self._thread.call(self._connection.close())

    def abort(self, reason: str = "aborted by this side") -> None:
        """End the connection now; does not wait."""
        self._thread.post(lambda: self._connection.abort(reason))


class EngineWindow:
    """Makes a window of this side usable from synchronous code."""

    def __init__(self, engine: Engine, window: Window) -> None:
        self._engine = engine  # keep a reference, or it would close
        self._thread = engine._thread
        self._window = window

    def __repr__(self) -> str:
        return repr(self._window)

    def offer(self, blocks: Blocks) -> bytes:
        """Allow blocks to be read, as :meth:`kvwire.Window.offer`; never waits."""
        return self._window.offer(blocks)

    def withdraw(self, blocks: Blocks | None = None) -> None:
        """Forbid reading blocks, as :meth:`kvwire.Window.withdraw`; never waits."""
        self._window.withdraw(blocks)

    def close(self) -> None:
        """Withdraw all blocks, and wait until no transport touches the memory."""
        self._thread.call(self._window.close())


class EngineRemoteWindow:
    """Makes a peer's window usable from synchronous code."""

    def __init__(self, engine: Engine, window: RemoteWindow) -> None:
        self._engine = engine
        self._thread = engine._thread
        self._window = window

    def __repr__(self) -> str:
        return repr(self._window)

    def get(
        self,
        ticket: bytes,
        into: PagedCache | Memory,
        blocks: Blocks | None = None,
        *,
        positions: slice | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        """Read blocks that the owner has offered, and wait for them.

        The arguments and errors are those of :meth:`kvwire.RemoteWindow.get`, with
        ``timeout`` in seconds instead of ``deadline``: blocks that have not arrived by
        then are missing. When it returns, nothing touches the blocks any more.
        """

        async def read() -> Outcome:
            request = self._window.get(
                ticket, into, blocks, positions=positions, deadline=timeout
            )
            outcome = await request
            await request.released()
            return outcome

        return self._thread.call(read())

    def close(self) -> None:
        """Stop reading, and notify the owner."""
        self._thread.call(self._window.close())


class _EngineTransfer:
    """Holds the methods that both ends of a transfer share in synchronous code."""

    def __init__(self, engine: Engine, end: Outgoing | Incoming) -> None:
        self._engine = engine  # keep a reference, or it would close
        self._thread = engine._thread
        self._end = end

    def __repr__(self) -> str:
        return repr(self._end)

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._end.done()

    @property
    def outcome(self) -> Outcome | None:
        """Return the outcome, once it is known; None before."""
        return self._end.outcome

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome.

        Raises:
            TimeoutError: There was no outcome within ``timeout`` seconds. The transfer
                continues; wait again, or abort it.
        """
        known = self._end.outcome
        if known is not None:
            return known
        return self._thread.call(_outcome(self._end), timeout)

    def wait_drained(self, timeout: float | None = None) -> None:
        """Wait until kvwire can no longer touch the blocks.

        Raises:
            TimeoutError: It did not drain within ``timeout`` seconds. The blocks are
                *not* free.
        """
        if not self._end.is_drained:
            self._thread.call(self._end.drained(), timeout)

    def abort(self, reason: str = "aborted") -> None:
        """End the transfer; memory is free once drained. Does not wait."""
        self._thread.post(lambda: self._end.abort(reason))


class EngineOutgoing(_EngineTransfer):
    """Makes a transfer that this side sends usable from synchronous code."""

    _end: Outgoing

    def ready(
        self,
        layers: Which = None,
        blocks: Which = None,
        *,
        group: str | None = None,
        after: Any = None,
    ) -> None:
        """Mark parts as ready, as :meth:`kvwire.Outgoing.ready`; never waits.

        A mark has no effect after the transfer has ended or the engine was closed, so a
        forward pass need not check.
        """
        self._end.ready(layers, blocks, group=group, after=after)

    def extend(self, blocks: Blocks) -> None:
        """Add blocks, as :meth:`kvwire.Outgoing.extend`; never waits."""
        self._end.extend(blocks)

    def finish(self, *, partial: bool = False) -> None:
        """Commit, as :meth:`kvwire.Outgoing.finish`; never waits."""
        self._end.finish(partial=partial)


class EngineIncoming(_EngineTransfer):
    """Makes a transfer that this side receives usable from synchronous code."""

    _end: Incoming

    def wait_layer(
        self, layer: int, timeout: float | None = None, *, group: str | None = None
    ) -> None:
        """Wait until a layer of every block has landed, and may be read.

        Raises:
            UsageError: There is no such layer or group.
            RequestError, ConnectionClosed, ProfileMismatch: The transfer ended before
                the layer landed; the error is the reason. ClosedOK also if the engine
                is closed.
            TimeoutError: The layer did not land within ``timeout`` seconds; the
                transfer continues.
        """
        if not self._end.layer_landed(layer, group):
            self._thread.call(self._end.layer(layer, group), timeout)

    def layer_landed(self, layer: int, *, group: str | None = None) -> bool:
        """Return whether a layer of every block has landed; does not wait."""
        return self._end.layer_landed(layer, group)


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


async def _outcome(end: Outgoing | Incoming) -> Outcome:
    return await end
