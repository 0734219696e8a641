"""Bugs of links, planted in those of `inproc`."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from typing import Any

import pytest

from kvwire.backend import Landing, LinkHandler, Payload
from kvwire.memory.copy import as_fragments, copy
from kvwire.types import Address
from kvwire_certify.conformance import check_backend
from kvwire_inproc import InprocBackend
from kvwire_inproc import backend as backend_module
from kvwire_inproc import link as link_module
from kvwire_inproc.backend import InprocListener
from kvwire_inproc.link import InprocLink
from kvwire_inproc.pipe import InprocPipe, PipeEnd, PipeFrame
from tests.backends.planted import expect_found, expect_found_in, leak_a_descriptor

# --- frames ---------------------------------------------------------------------------


@expect_found_in(InprocPipe.put, check_backend, "order.sizes[small]", "order.echo")
def test_loses_a_frame(put: Any, self: InprocPipe, frames: list[PipeFrame]) -> None:
    put(self, [frame for i, frame in enumerate(frames) if i % 10 != 9])
    if len(frames) == 1 and frames[0].payload_bytes == 300_000:
        self.done(frames[0])


@expect_found_in(PipeFrame.__init__, check_backend, "frame.headers")
def test_changes_a_header(
    init: Any, self: PipeFrame, header: bytes, *others: Any
) -> None:
    init(self, header[:7] + bytes([header[7] & 0x7F]) + header[8:], *others)


@expect_found_in(
    InprocPipe.move,
    check_backend,
    "payload.size[1]",
    "payload.kinds[view-to-thousands]",
)
def test_delivers_before_the_bytes_are_there(
    move: Any, self: InprocPipe, frame: PipeFrame, landing: Any, limit: int
) -> Any:
    if landing is not None and frame.payload is not None:
        source = link_module._owned(frame.payload)
        asyncio.get_running_loop().call_soon(copy, source, landing)
    return move(self, frame, None, limit)


@expect_found_in(
    InprocPipe.move,
    check_backend,
    "payload.kinds[view-to-thousands]",
    "payload.size[33]",
)
def test_writes_one_byte_too_many(
    move: Any, self: InprocPipe, frame: PipeFrame, landing: Any, limit: int
) -> Any:
    if landing is not None:
        pieces = as_fragments(landing)
        ctypes.memset(int(pieces.addresses[-1] + pieces.lengths[-1]), 1, 1)
    return move(self, frame, landing, limit)


# --- memory ---------------------------------------------------------------------------


@expect_found_in(
    InprocPipe.take_sent,
    check_backend,
    *("memory.source[view]", "memory.source-late", "threads.echo"),
)
def test_says_frame_sent_too_early(take_sent: Any, self: InprocPipe) -> list[object]:
    early = [frame.token for frame in self._frames if frame.token is not None]
    for frame in self._frames:
        frame.token = None
    return [*take_sent(self), *early]


@expect_found(
    check_backend,
    "frame.untokened[64KiB]",
    "frame.untokened-batch[flush]",
    "frame.untokened-batch[close]",
)
def test_keeps_no_copy_without_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(link_module, "_owned", lambda payload: payload)


@expect_found_in(
    InprocLink._finish, check_backend, "memory.abort-midway", "memory.peer-abort"
)
def test_writes_after_the_end(
    finish: Any, self: InprocLink, handler: LinkHandler, end: PipeEnd
) -> None:
    landing = self._landing
    finish(self, handler, end)
    if landing is not None and isinstance(landing.payload, memoryview):
        ends = landing.payload[-100:]
        self._loop.call_soon(ends.__setitem__, slice(None), bytes(100))


@expect_found_in(InprocPipe.end, check_backend, "memory.abort-sender")
def test_is_read_after_the_end(
    right: Any, self: InprocPipe, error: Exception | None
) -> None:
    self.finish()


@expect_found(
    check_backend, "memory.released-idle", "memory.released-aborted", "leak.collected"
)
def test_holds_memory_after_the_end(patch: pytest.MonkeyPatch) -> None:
    held: list[object] = []
    send = InprocLink.send

    def hold(
        self: InprocLink,
        header: bytes,
        payload: Payload | None = None,
        token: object | None = None,
    ) -> None:
        held.append((payload, self))
        send(self, header, payload, token)

    patch.setattr(InprocLink, "send", hold)


# --- callbacks ------------------------------------------------------------------------


@expect_found_in(InprocLink.flush, check_backend, "callback.once", "order.sizes[empty]")
def test_delivers_from_inside_flush(flush: Any, self: InprocLink) -> None:
    flush(self)
    self._peer._turn()


@expect_found_in(InprocLink.send, check_backend, "callback.nested")
def test_reenters_a_handler(send: Any, self: InprocLink, *arguments: Any) -> None:
    send(self, *arguments)
    self._turn()


@expect_found_in(
    InprocLink._turn, check_backend, "order.ping-pong", "memory.source-late"
)
def test_calls_back_on_another_thread(turn: Any, self: InprocLink) -> None:
    thread = threading.Thread(target=turn, args=(self,))
    thread.start()
    thread.join()


@expect_found_in(
    InprocLink._receive,
    check_backend,
    "callback.abort-in[header]",
    "memory.abort-receiver",
)
def test_delivers_what_was_refused(
    right: Any, self: InprocLink, handler: LinkHandler
) -> None:
    while (frame := self._into.head()) is not None:
        landing: Landing = handler.header_received(self, memoryview(frame.header))
        self._into.move(frame, landing.payload, frame.payload_bytes)
        self._into.done(frame)
        handler.body_received(self, landing)


@expect_found_in(
    InprocLink._receive,
    check_backend,
    "isolation.raises[arrival]",
    "isolation.raises[header]",
)
def test_swallows_errors_of_handlers(
    receive: Any, self: InprocLink, handler: LinkHandler
) -> None:
    try:
        receive(self, handler)
    except Exception:  # noqa: BLE001 - the bug
        self._landing = None


# --- the end --------------------------------------------------------------------------


@expect_found_in(
    InprocLink._finish,
    check_backend,
    "close.both",
    "abort.own[up]",
    "close.queued[small]",
)
def test_says_link_closed_twice(
    finish: Any, self: InprocLink, handler: LinkHandler, end: PipeEnd
) -> None:
    finish(self, handler, end)
    self._loop.call_soon(handler.link_closed, self, end.error)


@expect_found_in(
    InprocLink._finish, check_backend, "abort.own[up]", "callback.in-closed"
)
def test_never_says_link_closed_after_abort(
    finish: Any, self: InprocLink, handler: LinkHandler, end: PipeEnd
) -> None:
    if self._ending is None:
        finish(self, handler, end)


@expect_found_in(
    InprocPipe.finish,
    check_backend,
    *("close.queued[many]", "close.flushed[large]", "close.unread"),
)
def test_drops_the_queue_on_close(right: Any, self: InprocPipe) -> None:
    self.end(None)


@expect_found_in(InprocLink.close, check_backend, "close.against-bulk", "close.both")
def test_resets_what_the_peer_sends_on_close(close: Any, self: InprocLink) -> None:
    if not self._into.drained or self._out.queued_bytes > 4 << 20:
        self.abort()
    close(self)


@expect_found_in(InprocPipe.end, check_backend, "close.then-abort", "abort.bulk-told")
def test_takes_abort_for_a_clean_end(
    end: Any, self: InprocPipe, error: Exception | None
) -> None:
    end(self, None)


@expect_found_in(InprocLink.close, check_backend, "close.send-after")
def test_sends_after_close(close: Any, self: InprocLink) -> None:
    close(self)
    self._closing = False


# --- counters -------------------------------------------------------------------------


@expect_found_in(InprocLink.queued_bytes, check_backend, "pressure.queued-counts")
def test_forgets_headers_in_queued_bytes(right: Any, self: InprocLink) -> int:
    return sum(frame.payload_bytes for frame in self._unflushed)


@expect_found(check_backend, "pressure.unread")
def test_never_says_link_writable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLink, "_over", lambda self: True)


@expect_found(check_backend, "pressure.fair-loop", "pressure.fair-other")
def test_takes_the_loop_for_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(link_module, "WAKEUP_BYTES", 1 << 40)


@expect_found_in(
    InprocPipe.put, check_backend, "pressure.fair-loop", "close.flushed[many]"
)
def test_stops_behind_the_first_frame(
    put: Any, self: InprocPipe, frames: list[PipeFrame]
) -> None:
    if not self.__dict__.setdefault("stopped", False):
        put(self, frames[:1])
    self.__dict__["stopped"] = len(frames) > 0


# --- pausing --------------------------------------------------------------------------


@expect_found_in(
    InprocLink.pause, check_backend, "pause.before", "pause.each", "pause.end"
)
def test_ignores_pause(*_: Any) -> None:
    pass


# --- addresses, isolation and leaks ---------------------------------------------------


@expect_found(check_backend, "address.conflict")
def test_takes_a_taken_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(backend_module._names), "_free", lambda self, name: True)


@expect_found_in(InprocListener.take, check_backend, "address.again")
def test_closes_links_with_their_listener(
    take: Any, self: Any, link: InprocLink
) -> None:
    close = self.close

    async def close_both() -> None:
        await close()
        link.close()

    self.close = close_both
    take(self, link)


@expect_found_in(
    InprocListener.close, check_backend, "address.refused", "cancel.listen"
)
async def test_never_comes_back_from_closing(close: Any, self: InprocListener) -> None:
    await close(self)
    await asyncio.Event().wait()


@expect_found_in(InprocListener.take, check_backend, "address.accept-raises")
def test_gives_up_when_accept_raises(
    right: Any, self: InprocListener, link: InprocLink
) -> None:
    try:
        self._accept(link)
    except ValueError:
        backend_module._names.give_back(self)


@expect_found(check_backend, "isolation.sixteen")
def test_mixes_two_links(patch: pytest.MonkeyPatch) -> None:
    put = InprocPipe.put
    ways: list[InprocPipe] = []

    def astray(self: InprocPipe, frames: list[PipeFrame]) -> None:
        ways.append(self)
        put(ways[0] if len(ways) == 23 else self, frames)

    patch.setattr(InprocPipe, "put", astray)


@expect_found_in(
    InprocLink.__init__,
    check_backend,
    "leak.cycles[closed]",
    "payload.size[0]",
    "leak.cycles[unstarted]",
)
def test_leaks_a_descriptor_for_each_link(
    init: Any, self: InprocLink, *arguments: Any
) -> None:
    init(self, *arguments)
    leak_a_descriptor()


@expect_found_in(InprocBackend.connect, check_backend, "cancel.connect")
async def test_leaves_half_a_link_when_cancelled(
    connect: Any, self: InprocBackend, address: Address
) -> Any:
    link = await connect(self, address)
    await asyncio.sleep(0)
    return link
