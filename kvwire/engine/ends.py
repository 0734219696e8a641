"""The objects of an engine: connections, peers, memory and transfers, for threads.

Each wraps an object of the engine's loop (``EnginePeer`` a ``Peer``), and keeps its
engine alive. Calls that are coroutines there block the calling thread here; any thread
but the engine's own may make them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, overload

from kvwire.aio import run_to_completion
from kvwire.endpoint.connection import Connection
from kvwire.endpoint.peer import Peer
from kvwire.endpoint.region import Region
from kvwire.endpoint.remote_window import RemoteWindow
from kvwire.endpoint.request import Request
from kvwire.engine.io_thread import IOThread
from kvwire.errors import ClosedOK, KVWireError, UsageError, wrong_type
from kvwire.kv.blocks import Blocks
from kvwire.kv.fragments import Fragments
from kvwire.kv.outcome import Outcome
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec
from kvwire.memory.buffers import Memory, as_payload
from kvwire.memory.device.ops import Event
from kvwire.runtime.devices import Devices
from kvwire.transfers.incoming import Incoming
from kvwire.transfers.options import ReceiveOptions, SendOptions
from kvwire.transfers.outgoing import Outgoing
from kvwire.transfers.ready_log import Which
from kvwire.types import Access, AccessName, Grant, PeerInfo, TransportReport, Uncopied
from kvwire.windows.window import Window

T = TypeVar("T")
M = TypeVar("M", Region, Window, RemoteWindow)
V = TypeVar("V", Connection, Peer)


class _EngineVerbs(Uncopied, Generic[V]):
    """Holds the verbs that connections and peers share in synchronous code."""

    def __init__(self, engine: object, thread: IOThread, verbs: V) -> None:
        self._engine = engine  # keep a reference, or it would close
        self._thread = thread
        self._verbs: V = verbs

    def __repr__(self) -> str:
        return repr(self._verbs)

    def send(self, tag: int, buffer: Memory, *, timeout: float | None = None) -> int:
        """Send a message, and wait until the memory is free; return its length.

        Arguments and errors are those of :meth:`kvwire.Connection.send`, with
        ``timeout`` in seconds instead of ``deadline``. When it returns or raises,
        nothing touches ``buffer`` any more. An interrupt such as Ctrl-C cancels it, and
        is raised once the memory is free; a second one is raised at once, while the
        memory may still be in use.
        """
        after = self._queued(buffer)

        async def send() -> int:
            with self._devices.behind(after):
                request = self._verbs.send(tag, buffer, deadline=timeout)
            return await _finished(request)

        return self._thread.call(send())

    @overload
    def recv(
        self, tag: int, into: None = None, *, timeout: float | None = None
    ) -> bytearray: ...

    @overload
    def recv(self, tag: int, into: Memory, *, timeout: float | None = None) -> int: ...

    def recv(
        self, tag: int, into: Memory | None = None, *, timeout: float | None = None
    ) -> int | bytearray:
        """Wait for the next message of a tag; return it, or its length with ``into``.

        Arguments and errors are those of :meth:`kvwire.Connection.recv`, with
        ``timeout`` in seconds instead of ``deadline``. When it returns or raises,
        nothing touches ``into`` any more, as for :meth:`send`; a message that comes
        later is not lost.
        """
        after = None if into is None else self._queued(into)

        async def receive() -> int | bytearray:
            if into is None:
                return await _finished(self._verbs.recv(tag, deadline=timeout))
            with self._devices.behind(after):
                request = self._verbs.recv(tag, into, deadline=timeout)
            return await _finished(request)

        return self._thread.call(receive())

    def put(self, buffer: Memory, grant: Grant, *, timeout: float | None = None) -> int:
        """Write into memory that the peer has granted, and wait; return the length.

        Arguments and errors are those of :meth:`kvwire.Connection.put`; ``timeout``
        and memory are as for :meth:`send`.
        """
        after = self._queued(buffer)

        async def put() -> int:
            with self._devices.behind(after):
                request = self._verbs.put(buffer, grant, deadline=timeout)
            return await _finished(request)

        return self._thread.call(put())

    def get(self, grant: Grant, into: Memory, *, timeout: float | None = None) -> int:
        """Read memory that the peer has granted, and wait; return the length.

        Arguments and errors are those of :meth:`kvwire.Connection.get`; ``timeout``
        and memory are as for :meth:`send`.
        """
        after = self._queued(into)

        async def get() -> int:
            with self._devices.behind(after):
                request = self._verbs.get(grant, into, deadline=timeout)
            return await _finished(request)

        return self._thread.call(get())

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
        pull = self._verbs.pull
        return EngineIncoming(
            self._engine,
            self._thread,
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
        push = self._verbs.push
        return EngineOutgoing(
            self._engine,
            self._thread,
            self._thread.run(lambda: push(id, cache, blocks, **options)),
        )

    def window(self, name: str) -> EngineRemoteWindow:
        """Open a window of the peer, and wait until it is open.

        Raises:
            KVWireError: As :meth:`kvwire.Connection.window`.
        """
        opened = self._thread.call(self._verbs.window(name))
        return EngineRemoteWindow(self._engine, self._thread, opened)

    def close(self) -> None:
        """Close the connection gracefully, and wait until it has ended."""
        self._thread.call(self._verbs.close())

    def __enter__(self) -> Self:
        """Return it; the connection is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection, unless the engine is closed."""
        if not self._thread.forked:
            with suppress(ClosedOK):
                self.close()

    @property
    def _devices(self) -> Devices:
        return self._verbs._services.devices  # noqa: SLF001

    def _queued(self, memory: Memory) -> Event | None:
        """Return an event behind the work that this thread has queued on a device."""
        payload = as_payload(memory, writable=False)
        if isinstance(payload, Fragments) and payload.device is not None:
            return self._devices.recorded(payload.device)
        return None


async def _finished(request: Request[T]) -> T:
    """Return the result, once nothing touches the memory any more."""
    try:
        with suppress(KVWireError):  # it is raised below
            await request
        await request.released()
    except asyncio.CancelledError:  # the calling thread was interrupted
        request.cancel()
        await run_to_completion(request.released())
        raise
    return request.result()


class EngineConnection(_EngineVerbs[Connection]):
    """Makes a connection usable from synchronous code."""

    @property
    def peer(self) -> PeerInfo:
        """Return the peer's name, address and identity."""
        return self._verbs.peer

    @property
    def transport(self) -> str:
        """Return the name of the transport that carries its data."""
        return self._verbs.transport

    @property
    def transport_report(self) -> TransportReport:
        """Return the considered transports, and why each was or was not chosen."""
        return self._verbs.transport_report

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent: it is closing, closed or lost."""
        return self._verbs.closed

    @property
    def unreceived(self) -> dict[int, int]:
        """Return the number of unreceived messages per tag."""
        return self._thread.run(lambda: self._verbs.unreceived)

    def discard(self, tag: int) -> int:
        """Drop a tag's messages, as :meth:`kvwire.Connection.discard`."""
        return self._thread.run(lambda: self._verbs.discard(tag))

    def wait_closed(self, timeout: float | None = None) -> None:
        """Wait until the connection has ended, for whatever reason.

        Raises:
            TimeoutError: It was still open after ``timeout`` seconds.
        """
        self._thread.call(self._verbs.wait_closed(), timeout)

    def abort(self, reason: str = "aborted by this side") -> None:
        """End the connection now; does not wait."""
        self._thread.post(lambda: self._verbs.abort(reason))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it, or abort if an exception left the block."""
        if kind is not None and not self._thread.forked:
            self.abort(f"aborted by {kind.__name__}")
        super().__exit__(kind, error, trace)


class EnginePeer(_EngineVerbs[Peer]):
    """Makes a peer usable from synchronous code; see :class:`kvwire.Peer`."""

    @property
    def where(self) -> str:
        """Return the peer's address or selector."""
        return self._verbs.where

    @property
    def connection(self) -> EngineConnection | None:
        """Return the connection for the next request; None if there is none."""
        found = self._verbs.connection
        if found is None:
            return None
        return EngineConnection(self._engine, self._thread, found)

    def connect(self) -> EngineConnection:
        """Dial it now if it is not connected, and return the connection.

        Raises:
            KVWireError: As :meth:`kvwire.Peer.connect`.
        """
        found = self._thread.call(self._verbs.connect())
        return EngineConnection(self._engine, self._thread, found)


class _EngineMemory(Uncopied, Generic[M]):
    """Closes memory that peers may reach at the end of a block."""

    def __init__(self, engine: object, thread: IOThread, memory: M) -> None:
        self._engine = engine  # keep a reference, or it would close
        self._thread = thread
        self._memory: M = memory

    def __repr__(self) -> str:
        return repr(self._memory)

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return it; it is closed at the end of the block."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close it, unless the engine is closed."""
        if not self._thread.forked:
            with suppress(ClosedOK):
                self.close()


class EngineRegion(_EngineMemory[Region]):
    """Makes a region usable from synchronous code."""

    def __len__(self) -> int:
        """Return its length in bytes."""
        return len(self._memory)

    @property
    def access(self) -> Access:
        """Return the widest access that its grants may allow."""
        return self._memory.access

    def grant(
        self,
        connection: EngineConnection,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        access: AccessName | Access | None = None,
    ) -> Grant:
        """Allow the peer of one connection to reach a byte range.

        Arguments and errors are those of :meth:`kvwire.Region.grant`.
        """
        if not isinstance(connection, EngineConnection):
            raise wrong_type("grant", connection, "a connection of this engine")
        return self._thread.run(
            lambda: self._memory.grant(
                connection._verbs,  # noqa: SLF001
                offset=offset,
                nbytes=nbytes,
                access=access,
            )
        )

    def revoke(self) -> None:
        """End every grant made so far; new grants remain possible."""
        self._thread.run(self._memory.revoke)

    def close(self) -> None:
        """End every grant, and wait until kvwire no longer touches the memory."""
        self._thread.call(self._memory.close())


class EngineWindow(_EngineMemory[Window]):
    """Makes a window of this side usable from synchronous code."""

    @property
    def name(self) -> str:
        """Return the name by which peers open it."""
        return self._memory.name

    @property
    def closed(self) -> bool:
        """Return whether it was closed."""
        return self._memory.closed

    def offer(self, blocks: Blocks) -> bytes:
        """Allow blocks to be read, as :meth:`kvwire.Window.offer`; never waits."""
        return self._memory.offer(blocks)

    def withdraw(self, blocks: Blocks | None = None) -> None:
        """Forbid reading blocks, as :meth:`kvwire.Window.withdraw`; never waits."""
        self._memory.withdraw(blocks)

    def close(self) -> None:
        """Withdraw all blocks, and wait until no transport touches the memory."""
        self._thread.call(self._memory.close())


class EngineRemoteWindow(_EngineMemory[RemoteWindow]):
    """Makes a peer's window usable from synchronous code."""

    @property
    def name(self) -> str:
        """Return the name by which the owner exposes it."""
        return self._memory.name

    @property
    def specs(self) -> dict[str, KVSpec]:
        """Return the spec of each group of the owner's cache."""
        return self._memory.specs

    @property
    def way(self) -> str:
        """Return how blocks are read: "mapped", "process_vm_readv", "messages", ..."""
        return self._memory.way

    @property
    def owner_gone(self) -> bool:
        """Return whether the owner's process, or the connection to it, has ended."""
        return self._memory.owner_gone

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
        then are missing. When it returns or raises, nothing touches the blocks any
        more, as for :meth:`kvwire.EngineConnection.send`.
        """

        async def read() -> Outcome:
            request = self._memory.get(
                ticket, into, blocks, positions=positions, deadline=timeout
            )
            return await _finished(request)

        return self._thread.call(read())

    def close(self) -> None:
        """Stop reading, and notify the owner."""
        self._thread.call(self._memory.close())


class _EngineTransfer(Uncopied):
    """Holds the methods that both ends of a transfer share in synchronous code."""

    def __init__(
        self, engine: object, thread: IOThread, end: Outgoing | Incoming
    ) -> None:
        self._engine = engine  # keep a reference, or it would close
        self._thread = thread
        self._end = end

    def __repr__(self) -> str:
        return repr(self._end)

    @property
    def id(self) -> str | bytes | int:
        """Return the name that both applications use for the transfer."""
        return self._end.id

    @property
    def traceparent(self) -> str:
        """Return its trace as a W3C ``traceparent`` header; "" without tracing."""
        return self._end.traceparent

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._end.done()

    @property
    def is_drained(self) -> bool:
        """Whether kvwire can no longer touch the blocks."""
        return self._end.is_drained

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

    def renew_lease(self) -> None:
        """Restart the lease of the blocks while a consumer is missing; never waits."""
        self._thread.post(self._end.renew_lease)

    def __enter__(self) -> Self:
        """Return the transfer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish, or abort if an exception left the block.

        Raises:
            UsageError: Parts were not marked; the transfer is aborted.
        """
        if self._thread.forked:
            return  # it is its parent's
        if kind is not None:
            self.abort(f"{kind.__name__} in the producer")
            return
        try:
            self.finish()
        except UsageError as exc:
            self.abort(str(exc))
            raise


class EngineIncoming(_EngineTransfer):
    """Makes a transfer that this side receives usable from synchronous code."""

    _end: Incoming

    @property
    def met(self) -> bool:
        """Whether a matching peer has published or pushed it."""
        return self._end.met

    @property
    def carries(self) -> Mapping[str, tuple[range, range]]:
        """Return the model's layers and KV heads in the transfer, by group."""
        return self._thread.run(lambda: self._end.carries)

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

    def layer_event(self, layer: int, *, group: str | None = None) -> Any:
        """Return the event of a landed layer, as :meth:`kvwire.Incoming.layer_event`.

        A stream that waits for it may read the layer.
        """
        return self._thread.run(lambda: self._end.layer_event(layer, group))

    def __enter__(self) -> Self:
        """Return the transfer itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Abort the transfer unless it has ended, and wait until it is drained."""
        if not self._thread.forked:
            self.abort("its block has ended")
            self.wait_drained()


async def _outcome(end: Outgoing | Incoming) -> Outcome:
    return await end
