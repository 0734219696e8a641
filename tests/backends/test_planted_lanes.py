"""Bugs of lanes, planted in those of `inproc`; those of links are not repeated."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from kvwire.backend import Landing, Link
from kvwire.backend.lane import LaneHandler
from kvwire.kv.fragments import Fragments
from kvwire_certify.conformance import check_lanes
from kvwire_inproc.lane import InprocLane
from tests.backends.planted import expect_found_in, leak_a_descriptor

# --- coming up ------------------------------------------------------------------------


@expect_found_in(InprocLane.bootstrap, check_lanes, "join.idle")
def test_changes_its_bootstrap(*_: Any) -> bytes:
    return os.urandom(16)


@expect_found_in(
    InprocLane.join, check_lanes, "join.refuses[half]", "leak.cycles[refused]"
)
async def test_fails_on_a_bad_bootstrap_with_another_error(
    right: Any, self: InprocLane, bootstrap: bytes, handler: LaneHandler
) -> None:
    raise ValueError("not 16 bytes")


@expect_found_in(InprocLane.join, check_lanes, "join.disturbed[aborted]")
async def test_joins_after_it_was_aborted(
    join: Any, self: InprocLane, bootstrap: bytes, handler: LaneHandler
) -> None:
    self._ended = False
    await join(self, bootstrap, handler)
    self._ended = True


# --- memory ---------------------------------------------------------------------------


@expect_found_in(
    InprocLane.abort, check_lanes, "memory.abort-receiver", "memory.abort-midway"
)
def test_writes_after_the_end(
    end: Any, self: InprocLane, error: Exception | None
) -> None:
    landings = [landing.payload for _, landing in self._awaited]
    end(self, error)

    def write(turns: int) -> None:
        if turns:
            self.loop.call_soon(write, turns - 1)
            return
        for payload in landings:
            assert isinstance(payload, memoryview)
            payload[0] = 7

    # By then its owner has been told that the memory is free.
    write(turns=8)


# --- callbacks ------------------------------------------------------------------------


@expect_found_in(InprocLane.receive, check_lanes, "callback.unflushed")
def test_delivers_from_inside_receive(
    receive: Any, self: InprocLane, descriptor: bytes, landing: Landing
) -> None:
    receive(self, descriptor, landing)
    assert self._link is not None
    self._link.resume()
    self._link._turn()


# --- pressure and the end -------------------------------------------------------------


@expect_found_in(
    InprocLane.received_bytes, check_lanes, "pressure.received-total[landed]"
)
def test_does_not_count_what_is_dropped(*_: Any) -> int:
    return 0


@expect_found_in(InprocLane.close, check_lanes, "close.queued[nothing]", "close.twice")
def test_never_ends_when_closed(right: Any, self: InprocLane) -> None:
    self.flush()


@expect_found_in(
    InprocLane.link_closed, check_lanes, "abort.peer[awaiting]", "abort.peer[receiving]"
)
def test_lets_the_peer_wait_for_ever(
    closed: Any, self: InprocLane, link: Link, error: Exception | None
) -> None:
    if self._ended:
        closed(self, link, error)


# --- descriptors and leaks ------------------------------------------------------------


@expect_found_in(
    InprocLane.receive,
    check_lanes,
    "descriptor.refused[one-byte-more]",
    "descriptor.refused[too-long]",
)
def test_takes_any_descriptor(
    receive: Any, self: InprocLane, descriptor: bytes, landing: Landing
) -> None:
    receive(self, descriptor[:8].ljust(8, b"\0"), landing)


@expect_found_in(
    InprocLane.receive,
    check_lanes,
    "descriptor.truncated[view]",
    "descriptor.refused[of-ones]",
)
def test_fails_on_a_wrong_descriptor_with_another_error(
    receive: Any, self: InprocLane, descriptor: bytes, landing: Landing
) -> None:
    if len(descriptor) != 8:
        raise IndexError("8 bytes are needed")
    receive(self, descriptor, landing)


@expect_found_in(InprocLane.__init__, check_lanes, "leak.cycles[unjoined]", "join.idle")
def test_leaks_a_descriptor_for_each_lane(init: Any, self: InprocLane) -> None:
    init(self)
    leak_a_descriptor()


@expect_found_in(InprocLane.send, check_lanes, "windows.changing")
def test_sends_what_the_memory_held_before(
    send: Any, self: InprocLane, payload: Any, token: object
) -> bytes:
    """What a window that is read by messages does not survive."""
    assert isinstance(payload, Fragments)
    places = zip(payload.addresses.tolist(), payload.lengths.tolist(), strict=True)
    now = b"".join(ctypes.string_at(*place) for place in places)
    kept = self.__dict__.setdefault("kept", {}).setdefault(len(now), now)
    return bytes(send(self, memoryview(bytearray(kept)), token))
