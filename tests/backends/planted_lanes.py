"""Bugs of lanes, planted in those of `inproc`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvwire.backend import Landing, Payload
from kvwire.backend.lane import Lane, LaneHandler
from kvwire.memory.copy import as_fragments, copy
from kvwire_inproc import lane as lane_module
from kvwire_inproc.lane import InprocLane
from tests.backends.planted import Plants

PLANTS = Plants()
caught_by = PLANTS.caught_by
instead_of = PLANTS.instead_of


# --- coming up ------------------------------------------------------------------------


@caught_by("join.bootstrap")
def changes_its_bootstrap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLane, "bootstrap", property(lambda self: os.urandom(16)))


@instead_of(InprocLane.join, "join.refuses-client[half]", "leak.cycles[refused]")
async def fails_on_a_bad_bootstrap_with_another_error(
    _: Any, self: InprocLane, bootstrap: bytes, handler: LaneHandler
) -> None:
    raise ValueError("not 16 bytes")


@instead_of(InprocLane.join, "join.aborted")
async def joins_after_it_was_aborted(
    join: Any, self: InprocLane, bootstrap: bytes, handler: LaneHandler
) -> None:
    self._ended = False
    await join(self, bootstrap, handler)
    self._ended = True


# --- payloads -------------------------------------------------------------------------


@caught_by("payload.size[4096]", "close.flushed[large]")
def loses_the_last_byte(patch: pytest.MonkeyPatch) -> None:
    def short(source: Payload, destination: Payload) -> None:
        count = source.nbytes - 1
        copy(
            as_fragments(source).slice(0, count),
            as_fragments(destination).slice(0, count),
        )

    patch.setattr(lane_module, "copy", short)


@caught_by("payload.size[1]", "callback.unasked", "memory.released-idle")
def never_gives_memory_back(patch: pytest.MonkeyPatch) -> None:
    _patch_handler(patch, "payload_sent", lambda call, *arguments: None)


# --- memory ---------------------------------------------------------------------------


@caught_by("memory.source-late")
def gives_memory_back_when_it_is_flushed(patch: pytest.MonkeyPatch) -> None:
    flush = InprocLane.flush

    def early(self: InprocLane) -> None:
        tokens = [token for _, token in self._queue.values()]
        flush(self)
        self._taken.extend(tokens)

    patch.setattr(InprocLane, "flush", early)
    _once_for_each_token(patch)


def _once_for_each_token(patch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def once(call: Callable[..., None], lane: Lane, token: object) -> None:
        if not any(token is other for other in told):
            told.append(token)
            call(lane, token)

    _patch_handler(patch, "payload_sent", once)


@instead_of(InprocLane._end, "memory.abort-receiver", "memory.abort-midway")
def writes_after_the_end(end: Any, self: InprocLane, error: Exception | None) -> None:
    landings = [landing.payload for _, landing in self._awaited]
    end(self, error)

    def write(turns: int) -> None:
        if turns:
            self._loop.call_soon(write, turns - 1)
            return
        for payload in landings:
            assert isinstance(payload, memoryview)
            payload[0] = 7

    # By then its owner has been told that the memory is free.
    write(turns=8)


@caught_by("memory.abort-sender", "memory.released-aborted")
def is_read_after_the_end(patch: pytest.MonkeyPatch) -> None:
    end = InprocLane._end

    def readable(self: InprocLane, error: Exception | None) -> None:
        offers = dict(self._offers)
        end(self, error)
        self._offers.update(offers)

    patch.setattr(InprocLane, "_end", readable)
    patch.setattr(InprocLane, "_maybe_end", lambda self: None)


# --- callbacks ------------------------------------------------------------------------


@instead_of(InprocLane.receive, "callback.unflushed")
def delivers_from_inside_receive(
    receive: Any, self: InprocLane, descriptor: bytes, landing: Landing
) -> None:
    receive(self, descriptor, landing)
    self._turn()


@instead_of(InprocLane._turn, "callback.once", "order.ping-pong")
def calls_back_on_another_thread(turn: Any, self: InprocLane) -> None:
    def run() -> None:
        # A loop in debug mode says so.
        with contextlib.suppress(RuntimeError):
            turn(self)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@caught_by("isolation.raises[arrival]", "isolation.raises[sent]")
def swallows_errors_of_handlers(patch: pytest.MonkeyPatch) -> None:
    def deaf(call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:  # noqa: BLE001 - the bug
            return

    for name in ("payload_received", "payload_sent"):
        _patch_handler(patch, name, deaf)


# --- pressure and the end -------------------------------------------------------------


@caught_by("pressure.fair-loop", "pressure.fair-other")
def takes_the_loop_for_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lane_module, "LANE_WAKEUP_BYTES", 1 << 40)


@caught_by("pressure.received-rises")
def does_not_count_what_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLane, "received_bytes", property(lambda self: 0))


@caught_by("close.queued[nothing]", "close.twice")
def never_ends_when_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLane, "close", InprocLane.flush)


@caught_by("abort.peer[awaiting]", "abort.peer[receiving]")
def lets_the_peer_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLane, "_maybe_end", lambda self: None)


@caught_by("abort.own[up]", "leak.cycles[aborted]")
def never_says_that_it_ended(patch: pytest.MonkeyPatch) -> None:
    _patch_handler(patch, "lane_closed", lambda call, *arguments: None)


# --- descriptors and leaks ------------------------------------------------------------


@instead_of(
    InprocLane.receive,
    "descriptor.refused[one-byte-more]",
    "descriptor.refused[too-long]",
)
def takes_any_descriptor(
    receive: Any, self: InprocLane, descriptor: bytes, landing: Landing
) -> None:
    receive(self, descriptor[:8].ljust(8, b"\0"), landing)


@instead_of(
    InprocLane.receive, "descriptor.truncated[view]", "descriptor.refused[of-ones]"
)
def fails_on_a_wrong_descriptor_with_another_error(
    receive: Any, self: InprocLane, descriptor: bytes, landing: Landing
) -> None:
    if len(descriptor) != 8:
        raise IndexError("8 bytes are needed")
    receive(self, descriptor, landing)


@instead_of(InprocLane.__init__, "leak.cycles[unjoined]", "join.idle")
def leaks_a_descriptor_for_each_lane(init: Any, self: InprocLane, context: Any) -> None:
    init(self, context)
    PLANTS.leak_a_descriptor()


@caught_by("leak.collected", "memory.released-closed")
def keeps_lanes_that_ended(patch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    send = InprocLane.send

    def keep(self: InprocLane, payload: Payload, token: object) -> bytes:
        kept.append((self, self._handler, payload))
        return send(self, payload, token)

    patch.setattr(InprocLane, "send", keep)


def _patch_handler(
    patch: pytest.MonkeyPatch, name: str, instead: Callable[..., Any]
) -> None:
    """Let every lane's calls of one callback go through ``instead``."""
    join = InprocLane.join

    async def wrapped(self: InprocLane, bootstrap: bytes, handler: LaneHandler) -> None:
        await join(self, bootstrap, _Between(handler, name, instead))

    patch.setattr(InprocLane, "join", wrapped)


class _Between(LaneHandler):
    """Passes callbacks on, but for one that goes through a plant."""

    def __init__(
        self, handler: LaneHandler, name: str, instead: Callable[..., Any]
    ) -> None:
        self._handler = handler
        self._name = name
        self._instead = instead

    def payload_sent(self, lane: Lane, token: object) -> None:
        self._pass("payload_sent", (lane, token))

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        self._pass("payload_received", (lane, landing))

    def lane_writable(self, lane: Lane) -> None:
        self._pass("lane_writable", (lane,))

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        self._pass("lane_closed", (lane, error))

    def _pass(self, name: str, arguments: Iterable[object]) -> None:
        call = getattr(self._handler, name)
        if name == self._name:
            self._instead(call, *arguments)
        else:
            call(*arguments)
