"""Bugs of lanes, planted in those of `inproc`; those of links are not repeated."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import pytest

from kvwire.backend import Landing, Payload
from kvwire.backend.lane import LaneHandler
from kvwire.memory.copy import as_fragments, copy
from kvwire_inproc import lane as lane_module
from kvwire_inproc.lane import InprocLane
from tests.backends.planted import Plants

PLANTS = Plants()
caught_by = PLANTS.caught_by
instead_of = PLANTS.instead_of


# --- coming up ------------------------------------------------------------------------


@caught_by("join.idle")
def changes_its_bootstrap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLane, "bootstrap", property(lambda self: os.urandom(16)))


@instead_of(InprocLane.join, "join.refuses[half]", "leak.cycles[refused]")
async def fails_on_a_bad_bootstrap_with_another_error(
    _: Any, self: InprocLane, bootstrap: bytes, handler: LaneHandler
) -> None:
    raise ValueError("not 16 bytes")


@instead_of(InprocLane.join, "join.disturbed[aborted]")
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


# --- memory ---------------------------------------------------------------------------


@caught_by("memory.source-late")
def gives_memory_back_when_it_is_flushed(patch: pytest.MonkeyPatch) -> None:
    flush, tell_sent = InprocLane.flush, InprocLane._tell_sent

    def early(self: InprocLane) -> None:
        queue = self._queue.items()
        tokens = [token for _, (_, token) in queue]
        self._queue = {number: (payload, None) for number, (payload, _) in queue}
        flush(self)
        self._taken.extend(tokens)

    def once(self: InprocLane, handler: LaneHandler) -> None:
        self._taken = deque(token for token in self._taken if token is not None)
        tell_sent(self, handler)

    patch.setattr(InprocLane, "flush", early)
    patch.setattr(InprocLane, "_tell_sent", once)


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


# --- pressure and the end -------------------------------------------------------------


@caught_by("pressure.received-total[landed]")
def does_not_count_what_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLane, "received_bytes", property(lambda self: 0))


@caught_by("close.queued[nothing]", "close.twice")
def never_ends_when_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLane, "close", InprocLane.flush)


@caught_by("abort.peer[awaiting]", "abort.peer[receiving]")
def lets_the_peer_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InprocLane, "_maybe_end", lambda self: None)


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
