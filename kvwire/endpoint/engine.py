"""Synchronous access to a communicator, which runs on its own I/O thread.

For engines that are not asyncio programs: a scheduler's step loop, a worker's forward
pass. Marks are handed over without waiting; a wait blocks the calling thread on a lock
instead of polling; an idle engine costs no CPU.

Everything may be called from any thread but the engine's own. Some values (an outcome,
the landed layers) are read without asking the loop. They only ever change from unknown
to known, so an answer may be out of date but never wrong.
"""

from __future__ import annotations

import concurrent.futures
import os
import warnings
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from kvwire.aio import unusable
from kvwire.config import Config, ConfigOptions
from kvwire.directory import Record
from kvwire.endpoint.communicator import Communicator
from kvwire.endpoint.communicator import open as open_communicator
from kvwire.endpoint.connection import Connection
from kvwire.endpoint.engine_ends import EngineIncoming, EngineOutgoing
from kvwire.endpoint.io_thread import IOThread, bind_thread, called
from kvwire.endpoint.peer import Peer
from kvwire.endpoint.windows.window import Window
from kvwire.kv.blocks import Blocks
from kvwire.kv.paged import PagedCache
from kvwire.memory.buffers import Memory
from kvwire.transfers.options import PublishOptions, ReceiveOptions, SendOptions
from kvwire.types import Address, Uncopied

T = TypeVar("T")
# Time for closing directories and transports, after a communicator's connections.
_CLOSE_SLACK_S: Final = 30.0


@unusable(
    "write `with kvwire.Engine()`, without async; coroutines use kvwire.open",
    "__aenter__",
    "__aexit__",
)
class Engine(Uncopied):
    """Runs a communicator on its own thread; any thread may call it.

    It has the calls that an engine's threads need for transfers and windows. Everything
    else is a coroutine for :meth:`run`, which uses :attr:`communicator`::

        connection = engine.run(engine.communicator.accept())


        async def ask(question: bytes) -> bytes:
            await connection.send(1, question)
            return await connection.recv(2, deadline=5.0)


        answer = engine.run(ask(b"ready?"))

    Args:
        config: A Config, the path of a TOML file, or None for the environment alone.
        **arguments: Keys of Config that override ``config``.

    Raises:
        UsageError: The configuration cannot be used.
        BackendUnavailable: The system has no more threads or descriptors.
    """

    def __init__(
        self,
        config: Config | str | os.PathLike[str] | None = None,
        **arguments: Unpack[ConfigOptions],
    ) -> None:
        self._thread = IOThread("kvwire-engine")
        try:
            self._thread.begin()
            self._communicator = self._thread.run(
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
    def communicator(self) -> Communicator:
        """Return the communicator, for coroutines that this engine runs."""
        return self._communicator

    # --- coroutines -------------------------------------------------------------------

    def run(
        self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None
    ) -> T:
        """Run a coroutine on the engine's loop, and wait for its result.

        Whatever the coroutine raises is raised here, SystemExit included. After a
        timeout, or an interrupt such as Ctrl-C, the coroutine is cancelled, and has
        ended when this raises. Memory that it lent to a request may still be in use
        then: see :meth:`kvwire.Request.released`.

        Args:
            coroutine: For example ``engine.communicator.accept()``.
            timeout_s: Seconds until it is cancelled; None for as long as it takes.

        Raises:
            TimeoutError: It was not done in time. A result that came at that moment is
                returned instead.
            UsageError: From the engine's own thread, or after a fork; or ``coroutine``
                is not one.
            ClosedOK: The engine is closed.
        """
        return self._thread.run(coroutine, timeout_s)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the engine's loop without waiting for it.

        Any thread may wait for the returned future, or cancel it.

        Raises:
            UsageError: From the engine's own thread, or after a fork; or ``coroutine``
                is not one.
            ClosedOK: The engine is closed.
        """
        return self._thread.start(coroutine)

    # --- connections ------------------------------------------------------------------

    def listen(self, address: str | Address) -> Address:
        """Accept connections; see :meth:`kvwire.Communicator.listen`."""
        return self._thread.run(self._communicator.listen(address))

    def connect(
        self,
        address: str | Address,
        *,
        transport: str | Iterable[str] | None = None,
        timeout_s: float | None = None,
    ) -> Connection:
        """Connect, and wait for that; see :meth:`kvwire.Communicator.connect`.

        Returns:
            The connection, for :meth:`pull`, :meth:`push`, and coroutines.
        """
        return self._thread.run(
            self._communicator.connect(
                address, transport=transport, timeout_s=timeout_s
            )
        )

    # --- transfers --------------------------------------------------------------------

    def publish(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[PublishOptions],
    ) -> EngineOutgoing:
        """Offer a transfer without waiting, as :meth:`kvwire.Communicator.publish`."""
        return EngineOutgoing(
            self._thread,
            self,
            self._thread.run(
                called(lambda: self._communicator.publish(id, cache, blocks, **options))
            ),
        )

    def expect(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> EngineIncoming:
        """Receive a push without waiting, as :meth:`kvwire.Communicator.expect`."""
        return EngineIncoming(
            self._thread,
            self,
            self._thread.run(
                called(lambda: self._communicator.expect(id, cache, blocks, **options))
            ),
        )

    def pull(
        self,
        peer: Connection | Peer | Record | str,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> EngineIncoming:
        """Request a transfer without waiting, as :meth:`kvwire.Connection.pull`.

        ``peer`` is a connection or a peer; or an argument of
        :meth:`kvwire.Communicator.peer`, such as ``"10.0.0.7:7400"``, which is dialled
        if necessary.
        """
        return EngineIncoming(
            self._thread,
            self,
            self._thread.run(
                called(lambda: self._found(peer).pull(id, cache, blocks, **options))
            ),
        )

    def push(
        self,
        peer: Connection | Peer | Record | str,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[SendOptions],
    ) -> EngineOutgoing:
        """Send a transfer without waiting, as :meth:`kvwire.Connection.push`.

        ``peer`` is as for :meth:`pull`.
        """
        return EngineOutgoing(
            self._thread,
            self,
            self._thread.run(
                called(lambda: self._found(peer).push(id, cache, blocks, **options))
            ),
        )

    # --- windows ----------------------------------------------------------------------

    def expose(
        self,
        name: str,
        memory: PagedCache | Memory,
        *,
        block_bytes: int | None = None,
    ) -> Window:
        """Let peers read blocks without asking; see :meth:`kvwire.Communicator.expose`.

        Any thread may call the window's ``offer`` and ``withdraw``, which never wait.
        Its ``close`` is a coroutine for :meth:`run`, as is everything that reads a
        peer's window.
        """
        expose = self._communicator.expose
        return self._thread.run(
            called(lambda: expose(name, memory, block_bytes=block_bytes))
        )

    # --- the end ----------------------------------------------------------------------

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

    # --- inside -----------------------------------------------------------------------

    def _found(self, peer: Connection | Peer | Record | str) -> Connection | Peer:
        if isinstance(peer, Connection | Peer):
            return peer
        return self._communicator.peer(peer)


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
