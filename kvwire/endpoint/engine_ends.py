"""The two ends of a transfer, for threads.

Each wraps an end that belongs to the engine's loop. Calls that are coroutines there
block the calling thread here; any thread but the engine's own may make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kvwire.endpoint.io_thread import IOThread, called
from kvwire.errors import UsageError
from kvwire.kv.blocks import Blocks
from kvwire.kv.outcome import Outcome
from kvwire.transfers.incoming import Incoming
from kvwire.transfers.outgoing import Outgoing
from kvwire.transfers.ready_log import Which
from kvwire.types import Uncopied


class _EngineTransfer(Uncopied):
    """Holds the methods that both ends of a transfer share in synchronous code."""

    def __init__(
        self, thread: IOThread, engine: object, end: Outgoing | Incoming
    ) -> None:
        self._thread = thread
        self._engine = engine  # keep a reference, or it would close
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
        return self._thread.run(_outcome(self._end), timeout)

    def wait_drained(self, timeout: float | None = None) -> None:
        """Wait until kvwire can no longer touch the blocks.

        Raises:
            TimeoutError: It did not drain within ``timeout`` seconds. The blocks are
                *not* free.
        """
        if not self._end.is_drained:
            self._thread.run(self._end.drained(), timeout)

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
        return self._thread.run(called(lambda: self._end.carries))

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
            self._thread.run(self._end.layer(layer, group), timeout)

    def layer_landed(self, layer: int, *, group: str | None = None) -> bool:
        """Return whether a layer of every block has landed; does not wait."""
        return self._end.layer_landed(layer, group)

    def layer_event(self, layer: int, *, group: str | None = None) -> Any:
        """Return the event of a landed layer, as :meth:`kvwire.Incoming.layer_event`.

        A stream that waits for it may read the layer.
        """
        return self._thread.run(called(lambda: self._end.layer_event(layer, group)))

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
