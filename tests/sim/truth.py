"""Whether errors say what has happened: to a request, to a call, to a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvwire.errors import (
    AccessDenied,
    ClosedOK,
    ConnectionClosed,
    ConnectionLost,
    DeadlineExceeded,
    IntegrityError,
    KVWireError,
    MessageTooLarge,
    PeerCancelled,
    PeerUnresponsive,
    RequestCancelled,
    StaleRegion,
    UsageError,
)
from kvwire.limits import STALL_TOLERANCE_S
from kvwire.proto.events import Ended
from kvwire.proto.state import RequestKind
from tests.sim.ask import Ask
from tests.sim.endpoint import Endpoint
from tests.sim.memory import Violation, demand

if TYPE_CHECKING:
    from tests.sim.world import World

# What a peer is told about a grant that is not its own, whatever is wrong with it.
_NO_GRANT: Final = "no such grant on this connection"
# What is said of a close that has taken too long.
_TOO_LATE: Final = "did not finish closing in time"
_SAME_ANSWER: Final = frozenset({"wrong token", "foreign", "unknown"})


class Truth:
    """Compares what errors say with what has happened."""

    def __init__(self, world: World) -> None:
        setup = world.plan.setup
        self._world = world
        self._setup = setup
        self._patience_s = setup.ping_interval_s * setup.ping_misses
        self._claims: dict[type[KVWireError], Callable[[Ask], bool]] = {
            RequestCancelled: lambda ask: ask.cancelled,
            DeadlineExceeded: self._expired,
            PeerCancelled: self._peer_cancelled,
            AccessDenied: _has_no_right,
            StaleRegion: lambda ask: ask.aim is not None and not ask.aim.current,
            IntegrityError: self._damaged,
            MessageTooLarge: _is_too_large,
            ClosedOK: lambda ask: _closed(ask.endpoint) and not _is_delivered(ask),
            ConnectionLost: lambda ask: _closed(ask.endpoint),
            PeerUnresponsive: lambda ask: _closed(ask.endpoint),
        }

    # --- requests ---------------------------------------------------------------------

    def error(self, ask: Ask, error: KVWireError) -> None:
        """A request has failed: for the reason it gives?"""
        claim = self._claims.get(type(error))
        if claim is None or not claim(ask):
            raise Violation("untrue", f"{ask} failed with {error!r}, which is not so")
        if _TOO_LATE in str(error) and _is_delivered(ask):
            self._check_hindered(ask)
        if isinstance(error, AccessDenied) and ask.aim is not None:
            demand(
                _NO_GRANT in str(error) or ask.aim.wrong not in _SAME_ANSWER,
                "oracle",
                f"the answer to a {ask.aim.wrong} grant tells more: {error}",
            )

    def refused(self, ask: Ask, error: ConnectionClosed | UsageError) -> None:
        """The core would not start a request: is there a reason?"""
        if isinstance(error, UsageError):
            small = self._setup.small_tables
            demand(small, "limit", f"no room for a {ask.kind.value}: {error}")
        else:
            self.refused_as_closed(ask.endpoint)

    def refused_as_closed(self, endpoint: Endpoint) -> None:
        """The core says that the connection is closed, or closing."""
        demand(_closed(endpoint), "untrue", "refused as closed, which it is not")

    def no_deadline_passed(self, endpoint: Endpoint, now: float) -> None:
        """After a tick nothing is open whose deadline has passed."""
        for ask in endpoint.open:
            demand(
                ask.deadline is None or ask.deadline > now,
                "deadline",
                "a request is open after its deadline",
            )

    def _check_hindered(self, ask: Ask) -> None:
        """Puts and gets need no application: a close waits for them, and they move."""
        setup, wire = self._setup, ask.endpoint.end.out.wire
        slow = setup.stuck or setup.late or setup.gap or setup.bytes_per_s
        trips = setup.close_timeout_s / setup.latency_s[1]
        demand(
            slow or trips < 40 or not wire.healthy,
            "stuck",
            f"{ask} was not over when a close of {setup.close_timeout_s:g} s was",
        )

    def _expired(self, ask: Ask) -> bool:
        now = ask.endpoint.node.clock
        mine = ask.deadline is not None and ask.deadline <= now
        # Or the peer has given up its side of it.
        return mine or self._setup.deadlines > 0

    def _peer_cancelled(self, ask: Ask) -> bool:
        peer = ask.endpoint.peer
        return peer is None or peer.node.app.cancels > 0

    def _damaged(self, ask: Ask) -> bool:
        end = ask.endpoint.end
        return self._setup.checked and (end.into.damaged or end.out.damaged)

    # --- connections ------------------------------------------------------------------

    def ends(self, endpoint: Endpoint, event: Ended) -> None:
        """A connection is over: only once, and for the reason it gives?"""
        error = event.error
        self._world.note(endpoint.name, "ended", repr(error))
        demand(endpoint.ended is None, "closed", "a connection ended twice")
        if isinstance(error, ClosedOK):
            demand(_is_closing(endpoint), "untrue", "closed on purpose, by nobody")
        elif isinstance(error, PeerUnresponsive):
            self._check_silence(endpoint)
        else:
            demand(isinstance(error, ConnectionLost), "untrue", repr(error))

    def no_silence(self, endpoint: Endpoint) -> None:
        """After a tick nobody has been silent for longer than is borne."""
        if endpoint.node.was_late:
            return  # its own lateness is forgiven to its peer
        silence_s = self._world.now - endpoint.end.into.last_arrival()
        longest_s = self._patience_s + self._setup.ping_interval_s
        demand(
            silence_s < longest_s + STALL_TOLERANCE_S,
            "detection",
            f"{endpoint.name} has not noticed a silence of {silence_s:.3f} s",
        )

    def _check_silence(self, endpoint: Endpoint) -> None:
        """Whoever calls its peer dead has not heard of it for long enough."""
        lane = endpoint.end.into
        # A jump of the clock passes for the rest of the interval it falls into.
        jumps_s = endpoint.node.jumps * self._setup.ping_interval_s
        silence_s = self._world.now - lane.last_arrival()
        demand(
            silence_s >= self._patience_s - jumps_s - 2 * STALL_TOLERANCE_S,
            "blame",
            f"{endpoint.name} calls its peer dead, whose bytes came {silence_s:.3f} s "
            f"ago; its patience is {self._patience_s:g} s",
        )
        # Where payload pauses for as long as a ping waits, nobody can tell.
        longest_s = 6 * self._setup.latency_s[1] if self._setup.gap else 0.0
        demand(
            longest_s > self._setup.ping_interval_s / 2 or not lane.wire.healthy,
            "blame",
            f"{endpoint.name} calls a peer dead that lives and can be reached",
        )


def _is_closing(endpoint: Endpoint) -> bool:
    """Whether an application has called ``close``, on either side."""
    peer = endpoint.peer
    return endpoint.closing or (peer is not None and peer.closing)


def _closed(endpoint: Endpoint) -> bool:
    return endpoint.core.error is not None or _is_closing(endpoint)


def _is_delivered(ask: Ask) -> bool:
    """Whether it moves without the peer's application: a clean end awaits it."""
    return ask.kind in (RequestKind.PUT, RequestKind.GET)


def _has_no_right(ask: Ask) -> bool:
    # A full table forgets grants that are stale before it says no.
    return ask.aim is not None and (ask.aim.wrong != "" or not ask.aim.current)


def _is_too_large(ask: Ask) -> bool:
    if ask.kind is RequestKind.SEND:
        return ask.endpoint.end.out.mailbox(ask.tag).refused > 0
    box = ask.endpoint.end.into.mailbox(ask.tag)
    return any(message.nbytes > ask.nbytes for message in box.messages)
