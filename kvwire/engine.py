"""The same from synchronous code: an I/O thread with a loop of its own.

An engine that is no asyncio program (a scheduler's step loop, a worker's forward pass)
uses this. Marks are handed over without waiting; waits block the calling thread on a
lock and not on a poll; an engine with nothing to do costs no CPU.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from kvwire.communicator import Communicator
from kvwire.communicator import open as open_communicator
from kvwire.config import Config
from kvwire.connection import Connection
from kvwire.errors import UsageError
from kvwire.incoming import Incoming
from kvwire.kv.blocks import Blocks
from kvwire.kv.outcome import Outcome
from kvwire.kv.paged import PagedCache
from kvwire.marks import Which
from kvwire.outgoing import Outgoing
from kvwire.types import Address, PeerInfo, TransportReport

T = TypeVar("T")


class Engine:
    """A communicator on a thread of its own, for any thread to call.

    Args:
        config: A Config, the path of a TOML file, or None for the environment alone.
        **arguments: Keys of Config that override it.

    Raises:
        UsageError: The configuration cannot be used.
    """

    def __init__(
        self,
        config: Config | str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> None:
        self._pid = os.getpid()
        self._loop = _new_loop()
        self._thread = threading.Thread(
            target=_run, args=(self._loop,), name="kvwire-engine", daemon=True
        )
        self._thread.start()
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._communicator = self.call(_opened(config, arguments))
        except BaseException:
            self._stop_thread()
            raise
        # A daemon thread is cut off at exit; connections deserve a proper end.
        self._at_exit = _closer(weakref.ref(self))
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        return f"<Engine {'closed' if self._closed else self._communicator}>"

    def listen(self, address: str | Address) -> Address:
        """See :meth:`kvwire.Communicator.listen`."""
        return self.call(self._communicator.listen(address))

    def connect(
        self,
        address: str | Address,
        *,
        transport: str | Iterable[str] | None = None,
        timeout_s: float | None = None,
    ) -> EngineConnection:
        """See :meth:`kvwire.Communicator.connect`."""
        connection = self.call(
            self._communicator.connect(
                address, transport=transport, timeout_s=timeout_s
            )
        )
        return EngineConnection(self, connection)

    def accept(self, timeout: float | None = None) -> EngineConnection:
        """The next inbound connection.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Raises:
            TimeoutError: None came in time. None is lost by that.
            ClosedOK: The engine was closed.
        """
        return EngineConnection(self, self.call(self._communicator.accept(), timeout))

    def publish(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Any,
    ) -> EngineOutgoing:
        """See :meth:`kvwire.Communicator.publish`."""
        return EngineOutgoing(
            self,
            self.run(lambda: self._communicator.publish(id, cache, blocks, **options)),
        )

    def expect(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Any,
    ) -> EngineIncoming:
        """See :meth:`kvwire.Communicator.expect`."""
        return EngineIncoming(
            self,
            self.run(lambda: self._communicator.expect(id, cache, blocks, **options)),
        )

    def close(self) -> None:
        """End every transfer and connection, then the thread.

        Takes at most ``close_timeout_s``. Transfers in flight end with an outcome, and
        those who wait for them are woken. More than one call does no harm.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        if self._pid != os.getpid():
            return  # a fork has no thread of its own to end
        asyncio.run_coroutine_threadsafe(
            self._communicator.close(), self._loop
        ).result()
        self._stop_thread()

    def __enter__(self) -> Self:
        """The engine itself; it is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    # --- for what it hands out --------------------------------------------------------

    def call(
        self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None
    ) -> T:
        """Run a coroutine on the engine's loop and wait for its result.

        Raises:
            UsageError: From the engine's own thread, after a fork, or once closed.
            TimeoutError: It took longer than ``timeout`` seconds; it was cancelled.
        """
        try:
            self._check_thread()
        except UsageError:
            coroutine.close()
            raise
        waiting = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return waiting.result(timeout)
        except concurrent.futures.TimeoutError:
            if not waiting.cancel() and waiting.done():
                return waiting.result()
            raise TimeoutError(f"not within {timeout:g} s") from None

    def run(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's loop and wait for its result.

        Raises:
            UsageError: As :meth:`call`.
        """

        async def call() -> T:
            return function()

        return self.call(call())

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's loop soon, without waiting for it."""
        if not self._closed:
            self._loop.call_soon_threadsafe(function)

    def _check_thread(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("this Engine is of the process before the fork")
        if self._closed:
            raise UsageError("the Engine is closed")
        if threading.current_thread() is self._thread:
            raise UsageError("an Engine cannot be waited for from its own thread")

    def _stop_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class EngineConnection:
    """A connection, from synchronous code."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection

    def __repr__(self) -> str:
        return repr(self._connection)

    @property
    def peer(self) -> PeerInfo:
        """Who is at the other end."""
        return self._connection.peer

    @property
    def transport(self) -> str:
        """The transport that carries it."""
        return self._connection.transport

    @property
    def transport_report(self) -> TransportReport:
        """Every transport considered, and why it was taken or not."""
        return self._connection.transport_report

    def pull(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Any,
    ) -> EngineIncoming:
        """See :meth:`kvwire.Connection.pull`."""
        pull = self._connection.pull
        return EngineIncoming(
            self._engine, self._engine.run(lambda: pull(id, cache, blocks, **options))
        )

    def push(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Any,
    ) -> EngineOutgoing:
        """See :meth:`kvwire.Connection.push`."""
        push = self._connection.push
        return EngineOutgoing(
            self._engine, self._engine.run(lambda: push(id, cache, blocks, **options))
        )

    def close(self) -> None:
        """See :meth:`kvwire.Connection.close`."""
        self._engine.call(self._connection.close())

    def abort(self, reason: str = "aborted by this side") -> None:
        """See :meth:`kvwire.Connection.abort`."""
        self._engine.post(lambda: self._connection.abort(reason))


class _EngineTransfer:
    """What both ends of a transfer have from synchronous code."""

    def __init__(self, engine: Engine, end: Outgoing | Incoming) -> None:
        self._engine = engine
        self._end = end

    def __repr__(self) -> str:
        return repr(self._end)

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._end.done()

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, once it is known."""
        return self._end.outcome

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome.

        Raises:
            TimeoutError: It is not known within ``timeout`` seconds. The transfer goes
                on; wait again, or abort it.
        """
        known = self._end.outcome
        if known is not None:
            return known
        return self._engine.call(_outcome(self._end), timeout)

    def wait_drained(self, timeout: float | None = None) -> None:
        """Wait until nothing of kvwire can touch the blocks any more.

        Raises:
            TimeoutError: Not within ``timeout`` seconds. The blocks are *not* free.
        """
        if not self._end.is_drained:
            self._engine.call(self._end.drained(), timeout)

    def abort(self, reason: str = "aborted") -> None:
        """End the transfer; memory is free once drained. Does not wait."""
        self._engine.post(lambda: self._end.abort(reason))


class EngineOutgoing(_EngineTransfer):
    """A transfer that this side produces, from synchronous code."""

    _end: Outgoing

    def ready(
        self,
        layers: Which = None,
        blocks: Which = None,
        *,
        group: str | None = None,
        after: Any = None,
    ) -> None:
        """See :meth:`kvwire.Outgoing.ready`; does not wait."""
        self._end.ready(layers, blocks, group=group, after=after)

    def finish(self, *, partial: bool = False) -> None:
        """See :meth:`kvwire.Outgoing.finish`; does not wait."""
        self._end.finish(partial=partial)


class EngineIncoming(_EngineTransfer):
    """A transfer that this side consumes, from synchronous code."""

    _end: Incoming

    def wait_layer(
        self, layer: int, timeout: float | None = None, *, group: str | None = None
    ) -> None:
        """Wait until a layer of every block has landed, and may be read.

        Raises:
            UsageError: There is no such layer or group.
            RequestError: The transfer ended without it.
            TimeoutError: Not within ``timeout`` seconds; the transfer goes on.
        """
        if not self._end.layer_landed(layer, group):
            self._engine.call(self._end.layer(layer, group), timeout)

    def layer_landed(self, layer: int, *, group: str | None = None) -> bool:
        """Whether a layer of every block has landed; does not wait."""
        return self._end.layer_landed(layer, group)


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415 - not there on Windows

    return uvloop.new_event_loop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _opened(
    config: Config | str | os.PathLike[str] | None, arguments: dict[str, Any]
) -> Communicator:
    return await open_communicator(config, **arguments)


async def _outcome(end: Outgoing | Incoming) -> Outcome:
    return await end


def _closer(engine: weakref.ref[Engine]) -> Callable[[], None]:
    def close() -> None:
        found = engine()
        if found is not None:
            found.close()

    return close
