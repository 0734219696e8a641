"""The conformance kit finds bugs: each planted one is caught by the checks it names.

A plant changes one method of the reference backend, the way a real backend gets it
wrong. Every check named here passes on the reference backend as it is.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvwire.backend import Landing, Link, LinkHandler, Payload
from kvwire.memory.copy import as_fragments, copy
from kvwire.testing.conformance import CHECKS, run_check
from kvwire.types import Address
from kvwire_inproc import InprocBackend
from kvwire_inproc import backend as backend_module
from kvwire_inproc import link as link_module
from kvwire_inproc.backend import InprocListener
from kvwire_inproc.link import InprocLink
from kvwire_inproc.pipe import InprocPipe, PipeEnd, PipeFrame
from tests.backends.planted import Plant, Plants, expect_caught, id_of

PLANTS = Plants()
caught_by = PLANTS.caught_by

# A planted bug may make the kit wait in vain; nothing here takes as long by itself.
_TIMEOUT_S = 0.4


@pytest.mark.parametrize(("check", "plant"), PLANTS.cases, ids=id_of)
# The bugs are in code that treats all loops alike.
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_bug_is_caught(
    check: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    chosen = next(c for c in CHECKS if c.id == check)
    result = await run_check(
        chosen, InprocBackend, Address("inproc", ""), timeout_s=_TIMEOUT_S
    )
    expect_caught(result)


@pytest.fixture(autouse=True)
async def _clean_up() -> AsyncIterator[None]:
    yield
    await PLANTS.clean_up()


# --- frames ---------------------------------------------------------------------------


@caught_by("order.one-flush[small]", "order.echo")
def loses_a_frame(patch: pytest.MonkeyPatch) -> None:
    put = InprocPipe.put

    def lossy(self: InprocPipe, frames: list[PipeFrame]) -> None:
        put(self, [frame for i, frame in enumerate(frames) if i % 10 != 9])
        if len(frames) == 1 and frames[0].payload_bytes == 300_000:
            self.done(frames[0])

    patch.setattr(InprocPipe, "put", lossy)


@caught_by("order.one-flush[pages]", "flush.again")
def sends_a_frame_twice(patch: pytest.MonkeyPatch) -> None:
    put = InprocPipe.put

    def doubling(self: InprocPipe, frames: list[PipeFrame]) -> None:
        first = frames[0]
        put(self, [PipeFrame(first.header, first.payload, None), *frames])

    patch.setattr(InprocPipe, "put", doubling)


@caught_by("order.one-flush[alternating]", "order.kinds")
def lets_small_frames_overtake(patch: pytest.MonkeyPatch) -> None:
    put = InprocPipe.put

    def sorting(self: InprocPipe, frames: list[PipeFrame]) -> None:
        put(self, sorted(frames, key=lambda frame: frame.payload_bytes))

    patch.setattr(InprocPipe, "put", sorting)


@caught_by("frame.headers")
def changes_a_header(patch: pytest.MonkeyPatch) -> None:
    def frame(header: bytes, payload: Payload | None, token: object) -> PipeFrame:
        return PipeFrame(
            header[:7] + bytes([header[7] & 0x7F]) + header[8:], payload, token
        )

    patch.setattr(link_module, "PipeFrame", frame)


@caught_by("frame.size[1MiB]", "frame.kinds[pages-to-uneven]", "order.both-ways")
def ignores_short_writes(patch: pytest.MonkeyPatch) -> None:
    move = InprocPipe.move

    def short(
        self: InprocPipe, frame: PipeFrame, landing: Payload | None, bytes_max: int
    ) -> int:
        count = move(self, frame, landing, 64 * 1024)
        rest = frame.payload_bytes - frame.moved
        frame.moved += rest
        self.queued_bytes -= rest
        return count + rest

    patch.setattr(InprocPipe, "move", short)


@caught_by("frame.size[1]", "frame.kinds[view-to-thousands]")
def delivers_before_the_bytes_are_there(patch: pytest.MonkeyPatch) -> None:
    move = InprocPipe.move

    def late(
        self: InprocPipe, frame: PipeFrame, landing: Payload | None, bytes_max: int
    ) -> int:
        if landing is not None and frame.payload is not None:
            source = link_module._owned(frame.payload)
            asyncio.get_running_loop().call_soon(copy, source, landing)
        return move(self, frame, None, bytes_max)

    patch.setattr(InprocPipe, "move", late)


@caught_by("frame.small-kinds[thousands]", "frame.size[33]")
def writes_one_byte_too_many(patch: pytest.MonkeyPatch) -> None:
    move = InprocPipe.move

    def beyond(
        self: InprocPipe, frame: PipeFrame, landing: Payload | None, bytes_max: int
    ) -> int:
        if landing is not None:
            pieces = as_fragments(landing)
            ctypes.memset(int(pieces.addresses[-1] + pieces.lengths[-1]), 1, 1)
        return move(self, frame, landing, bytes_max)

    patch.setattr(InprocPipe, "move", beyond)


# --- memory ---------------------------------------------------------------------------


@caught_by("memory.source[view]", "memory.source-late", "threads.bulk")
def says_frame_sent_too_early(patch: pytest.MonkeyPatch) -> None:
    put = InprocPipe.put

    def early(self: InprocPipe, frames: list[PipeFrame]) -> None:
        put(self, frames)
        for frame in frames:
            self._sent.append(frame.token)
            frame.token = None

    patch.setattr(InprocPipe, "put", early)
    # The sender has a turn before the receiver.
    wake_peer = InprocLink.wake_peer

    def wake_both(self: InprocLink) -> None:
        self.wake()
        wake_peer(self)

    patch.setattr(InprocLink, "wake_peer", wake_both)


@caught_by("frame.untokened[64KiB]", "frame.untokened-batch", "close.untokened")
def keeps_no_copy_without_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(link_module, "_owned", lambda payload: payload)


@caught_by("memory.abort-midway", "memory.peer-abort")
def writes_after_the_end(patch: pytest.MonkeyPatch) -> None:
    finish = InprocLink._finish

    def late(self: InprocLink, handler: LinkHandler, end: PipeEnd) -> None:
        landing = self._landing
        finish(self, handler, end)
        if landing is not None and isinstance(landing.payload, memoryview):
            ends = landing.payload[-100:]
            self._loop.call_soon(ends.__setitem__, slice(None), bytes(100))

    patch.setattr(InprocLink, "_finish", late)


@caught_by("memory.abort-sender", "abort.dropped-told", "close.then-abort")
def sends_on_after_abort(patch: pytest.MonkeyPatch) -> None:
    def end(self: InprocPipe, _error: Exception | None) -> None:
        self._finishing = True

    patch.setattr(InprocPipe, "end", end)


@caught_by("memory.released-idle")
def holds_the_last_payload(patch: pytest.MonkeyPatch) -> None:
    done = InprocPipe.done

    def hold(self: Any, frame: PipeFrame) -> None:
        done(self, frame)
        self.last = frame

    patch.setattr(InprocPipe, "done", hold)


@caught_by("memory.released-closed", "memory.released-aborted", "leak.collected")
def holds_memory_after_the_end(patch: pytest.MonkeyPatch) -> None:
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


@caught_by("callback.sent-once", "order.one-flush[empty]")
def delivers_from_inside_flush(patch: pytest.MonkeyPatch) -> None:
    flush = InprocLink.flush

    def eager(self: InprocLink) -> None:
        flush(self)
        self._peer._turn()

    patch.setattr(InprocLink, "flush", eager)


@caught_by("callback.start")
def delivers_from_inside_start(patch: pytest.MonkeyPatch) -> None:
    start = InprocLink.start

    def eager(self: InprocLink, handler: LinkHandler) -> None:
        start(self, handler)
        self._turn()

    patch.setattr(InprocLink, "start", eager)


@caught_by("callback.abort", "abort.own[idle]")
def closes_from_inside_abort(patch: pytest.MonkeyPatch) -> None:
    abort = InprocLink.abort

    def eager(self: InprocLink) -> None:
        abort(self)
        self._turn()

    patch.setattr(InprocLink, "abort", eager)


@caught_by("callback.nested")
def reenters_a_handler(patch: pytest.MonkeyPatch) -> None:
    send = InprocLink.send

    def eager(self: InprocLink, *arguments: Any) -> None:
        send(self, *arguments)
        self._turn()

    patch.setattr(InprocLink, "send", eager)


@caught_by("order.ping-pong", "callback.unasked")
def calls_back_on_another_thread(patch: pytest.MonkeyPatch) -> None:
    turn = InprocLink._turn

    def elsewhere(self: InprocLink) -> None:
        thread = threading.Thread(target=turn, args=(self,))
        thread.start()
        thread.join()

    patch.setattr(InprocLink, "_turn", elsewhere)


@caught_by("callback.sent-once", "frame.none")
def says_frame_sent_twice(patch: pytest.MonkeyPatch) -> None:
    take_sent = InprocPipe.take_sent

    def twice(self: InprocPipe) -> list[object]:
        return take_sent(self) * 2

    patch.setattr(InprocPipe, "take_sent", twice)


@caught_by("callback.sent-untokened")
def says_frame_sent_without_token(patch: pytest.MonkeyPatch) -> None:
    remove = InprocPipe._remove

    def untokened(self: InprocPipe, frame: PipeFrame) -> None:
        remove(self, frame)
        if frame.token is None:
            self._sent.append(None)

    patch.setattr(InprocPipe, "_remove", untokened)


@caught_by("frame.size[255]", "callback.sent-once")
def looks_at_tokens(patch: pytest.MonkeyPatch) -> None:
    take_sent = InprocPipe.take_sent

    def unique(self: InprocPipe) -> list[object]:
        return list(set(take_sent(self)))

    patch.setattr(InprocPipe, "take_sent", unique)


@caught_by("callback.abort-in-header", "memory.abort-receiver")
def delivers_what_was_refused(patch: pytest.MonkeyPatch) -> None:
    def receive(self: InprocLink, handler: LinkHandler) -> None:
        while (frame := self._into.head()) is not None:
            landing: Landing = handler.header_received(self, memoryview(frame.header))
            self._into.move(frame, landing.payload, frame.payload_bytes)
            self._into.done(frame)
            handler.body_received(self, landing)

    patch.setattr(InprocLink, "_receive", receive)


@caught_by("isolation.raises[body]", "isolation.raises[header]")
def swallows_errors_of_handlers(patch: pytest.MonkeyPatch) -> None:
    receive = InprocLink._receive

    def deaf(self: InprocLink, handler: LinkHandler) -> None:
        try:
            receive(self, handler)
        except Exception:  # noqa: BLE001 - the bug
            self._landing = None

    patch.setattr(InprocLink, "_receive", deaf)


# --- the end --------------------------------------------------------------------------


@caught_by("close.both", "abort.own[started]", "close.queued[small]")
def says_link_closed_twice(patch: pytest.MonkeyPatch) -> None:
    finish = InprocLink._finish

    def twice(self: InprocLink, handler: LinkHandler, end: PipeEnd) -> None:
        finish(self, handler, end)
        self._loop.call_soon(handler.link_closed, self, end.error)

    patch.setattr(InprocLink, "_finish", twice)


@caught_by("abort.own[started]", "callback.in-closed")
def never_says_link_closed_after_abort(patch: pytest.MonkeyPatch) -> None:
    finish = InprocLink._finish

    def silent(self: InprocLink, handler: LinkHandler, end: PipeEnd) -> None:
        if self._ending is None:
            finish(self, handler, end)

    patch.setattr(InprocLink, "_finish", silent)


@caught_by("close.queued[many]", "close.flushed[large]", "close.unread")
def drops_the_queue_on_close(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocPipe, "finish", lambda self: self.end(None))


@caught_by("close.against-bulk", "close.both-queued")
def resets_what_the_peer_sends_on_close(patch: pytest.MonkeyPatch) -> None:
    close = InprocLink.close

    def hasty(self: InprocLink) -> None:
        if not self._into.drained or self._out.queued_bytes > 4 << 20:
            self.abort()
        close(self)

    patch.setattr(InprocLink, "close", hasty)


@caught_by("abort.dropped-told", "close.then-abort", "abort.bulk-told")
def takes_abort_for_a_clean_end(patch: pytest.MonkeyPatch) -> None:
    end = InprocPipe.end
    patch.setattr(InprocPipe, "end", lambda self, error: end(self, None))


@caught_by("abort.twice", "callback.in-closed")
def raises_on_a_second_abort(patch: pytest.MonkeyPatch) -> None:
    abort = InprocLink.abort

    def once(self: InprocLink) -> None:
        if self._ending is not None:
            raise RuntimeError("already aborted")
        abort(self)

    patch.setattr(InprocLink, "abort", once)


@caught_by("close.send-after")
def sends_after_close(patch: pytest.MonkeyPatch) -> None:
    close = InprocLink.close

    def reopening(self: InprocLink) -> None:
        close(self)
        self._closing = False

    patch.setattr(InprocLink, "close", reopening)


# --- counters -------------------------------------------------------------------------


@caught_by("pressure.queued-counts")
def forgets_headers_in_queued_bytes(patch: pytest.MonkeyPatch) -> None:
    queued = property(lambda self: sum(f.payload_bytes for f in self._unflushed))
    patch.setattr(InprocLink, "queued_bytes", queued)


@caught_by("pressure.queued-falls", "pressure.unread")
def never_lowers_queued_bytes(patch: pytest.MonkeyPatch) -> None:
    queued = property(lambda self: 1 + self._unflushed_bytes)
    patch.setattr(InprocLink, "queued_bytes", queued)


@caught_by("pressure.unread", "pressure.unread-bounded")
def says_that_nothing_is_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLink, "queued_bytes", property(lambda self: 0))


@caught_by("pressure.writable", "pressure.writable-refill")
def never_says_link_writable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLink, "_over", lambda self: True)


@caught_by("pressure.received-dropped")
def does_not_count_dropped_payload(patch: pytest.MonkeyPatch) -> None:
    receive = InprocLink._receive_payload

    def uncounted(self: InprocLink, frame: PipeFrame, landing: Landing) -> int:
        before = self._received_bytes
        moved = receive(self, frame, landing)
        if landing.payload is None:
            self._received_bytes = before
        return moved

    patch.setattr(InprocLink, "_receive_payload", uncounted)


@caught_by("pressure.fair-loop", "pressure.fair-link", "pressure.received-rises")
def takes_the_loop_for_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(link_module, "WAKEUP_BYTES", 1 << 40)


# --- pausing --------------------------------------------------------------------------


@caught_by("pause.before", "pause.each", "pause.again")
def ignores_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLink, "pause", lambda self: None)


@caught_by("pause.before", "pause.each", "pause.again")
def never_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLink, "resume", lambda self: None)


# --- addresses, isolation and leaks ---------------------------------------------------


@caught_by("address.conflict")
def takes_a_taken_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(backend_module._names), "_free", lambda self, name: True)


@caught_by("address.again", "address.refused")
def keeps_the_name_of_a_closed_listener(patch: pytest.MonkeyPatch) -> None:
    names = type(backend_module._names)
    patch.setattr(names, "give_back", lambda self, listener: None)


@caught_by("address.refused")
def waits_for_a_listener(patch: pytest.MonkeyPatch) -> None:
    connect = InprocBackend.connect

    async def patient(self: InprocBackend, address: Address) -> Link:
        try:
            return await connect(self, address)
        except OSError:
            await asyncio.Event().wait()
            raise

    patch.setattr(InprocBackend, "connect", patient)


@caught_by("address.close-keeps-links")
def closes_links_with_their_listener(patch: pytest.MonkeyPatch) -> None:
    taken: list[InprocLink] = []
    take, close = InprocListener.take, InprocListener.close

    def remember(self: InprocListener, link: InprocLink) -> None:
        taken.append(link)
        take(self, link)

    async def close_all(self: InprocListener) -> None:
        await close(self)
        for link in taken:
            link.close()

    patch.setattr(InprocListener, "take", remember)
    patch.setattr(InprocListener, "close", close_all)


@caught_by("address.accept-raises")
def gives_up_when_accept_raises(patch: pytest.MonkeyPatch) -> None:
    def fragile(self: InprocListener, link: InprocLink) -> None:
        try:
            self._accept(link)
        except ValueError:
            backend_module._names.give_back(self)

    patch.setattr(InprocListener, "take", fragile)


@caught_by("isolation.two", "isolation.sixteen")
def mixes_two_links(patch: pytest.MonkeyPatch) -> None:
    put = InprocPipe.put
    ways: list[InprocPipe] = []

    def astray(self: InprocPipe, frames: list[PipeFrame]) -> None:
        ways.append(self)
        put(ways[0] if len(ways) == 23 else self, frames)

    patch.setattr(InprocPipe, "put", astray)


@caught_by("leak.cycles[closed]", "frame.none", "abort.unstarted-both")
def leaks_a_descriptor_for_each_link(patch: pytest.MonkeyPatch) -> None:
    init = InprocLink.__init__

    def leaky(self: InprocLink, *arguments: Any) -> None:
        init(self, *arguments)
        PLANTS.leak_a_descriptor()

    patch.setattr(InprocLink, "__init__", leaky)


@caught_by("frame.none", "leak.cycles[refused]", "cancel.connect")
def leaks_a_task_for_each_connect(patch: pytest.MonkeyPatch) -> None:
    connect = InprocBackend.connect

    async def leaky(self: InprocBackend, address: Address) -> Link:
        PLANTS.leak_a_task()
        return await connect(self, address)

    patch.setattr(InprocBackend, "connect", leaky)


@caught_by("cancel.connect-peer")
def leaves_half_a_link_when_cancelled(patch: pytest.MonkeyPatch) -> None:
    connect = InprocBackend.connect

    async def slow(self: InprocBackend, address: Address) -> Link:
        link = await connect(self, address)
        await asyncio.sleep(0)
        return link

    patch.setattr(InprocBackend, "connect", slow)
