"""Every state of a request and of a connection, and every step between them.

Rule 1: every transition is defined in this file. Rule 2: both sides use the same
tables. A step that is not listed does not exist: if our own code requests it, that is a
bug; if a frame causes it, the peer has made an error.

A request is one data movement, seen from one side:

* SEND and RECV move a message that is too large to be sent unasked. The sender
  announces it (POSTED), the receiver answers once it has memory (GO), and the bytes
  move.
* A message that is small enough to be sent at once has only a RECV, because its sender
  has nothing to wait for.
* PUT moves at once, since the grant is the permission; it ends when the peer reports
  that every byte is in place.
* GET moves as soon as it has reached the peer, where it is a SERVE_GET.
* SERVE_PUT and SERVE_GET are these movements on the side that granted the memory.
* OPEN_WINDOW waits for the window owner's answer.
* READ moves as soon as it has reached the peer, where it is a SERVE_READ. Both end with
  the owner's last frame, which reports the blocks that were withdrawn meanwhile.
* OUTGOING and INCOMING are the two ends of a KV transfer. It waits until the
  applications on both sides have named it (GO), and moves segment by segment
  (kvwire.proto.transfers). The producer's end is over when the consumer reports that
  everything is settled, the consumer's when the producer has received that report.

States:

* POSTED: waits for a match, for credit, or for the peer's answer; no byte moves yet.
* MOVING: payload may be under way, and the request's memory is in use.
* WAITING: every byte was sent or has arrived here; the peer's last frame is missing.
* DONE, FAILED: over. Memory may still be in use, as the holds show
  (kvwire.proto.holds).

Inputs:

* GO: matched, permitted, or given credit.
* MOVED: the link has sent the last byte, or the last byte has arrived and was verified.
* CONFIRMED: the last frame of the request was sent or received.
* FAIL: cancelled, expired, refused or broken, on either side.

A connection, once its handshake is over:

* OPEN: everything is allowed.
* FLUSHING: this side wants to close, and finishes its open requests first.
* CLOSE_SENT: this side has sent CLOSE, and waits for the peer's.
* CLOSE_RECEIVED: the peer has sent CLOSE; this side finishes its open requests, then
  answers.
* CLOSED: nothing more is sent; the link is ending or has ended.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from kvwire.types import Symbol


class RequestKind(Symbol):
    """The kinds of requests, seen from this side."""

    SEND = "send"
    RECV = "recv"
    PUT = "put"
    GET = "get"
    SERVE_PUT = "serve put"
    SERVE_GET = "serve get"
    OPEN_WINDOW = "opening of a window"
    READ = "get from a window"
    SERVE_READ = "serve get from a window"
    OUTGOING = "outgoing transfer"
    INCOMING = "incoming transfer"


class RequestStage(Symbol):
    """The states of a request."""

    POSTED = "posted"
    MOVING = "moving"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


class RequestInput(Symbol):
    """The inputs of a request's state machine."""

    GO = "go"
    MOVED = "moved"
    CONFIRMED = "confirmed"
    FAIL = "fail"


_GO: Final = (RequestInput.GO, RequestStage.MOVING)
_DONE: Final = (RequestInput.MOVED, RequestStage.DONE)
_WAIT: Final = (RequestInput.MOVED, RequestStage.WAITING)
_CONFIRMED: Final = (RequestInput.CONFIRMED, RequestStage.DONE)
# The states of each kind if nothing fails: the first state, then pairs of an input and
# the next state.
_WAYS: Final = {
    RequestKind.SEND: (RequestStage.POSTED, (_GO, _DONE)),
    RequestKind.RECV: (RequestStage.POSTED, (_GO, _DONE)),
    RequestKind.PUT: (RequestStage.MOVING, (_WAIT, _CONFIRMED)),
    RequestKind.GET: (RequestStage.MOVING, (_DONE,)),
    RequestKind.SERVE_PUT: (RequestStage.MOVING, (_DONE,)),
    RequestKind.SERVE_GET: (RequestStage.MOVING, (_DONE,)),
    RequestKind.OPEN_WINDOW: (RequestStage.WAITING, (_CONFIRMED,)),
    RequestKind.READ: (RequestStage.MOVING, (_WAIT, _CONFIRMED)),
    RequestKind.SERVE_READ: (RequestStage.MOVING, (_WAIT, _CONFIRMED)),
    RequestKind.OUTGOING: (RequestStage.POSTED, (_GO, _WAIT, _CONFIRMED)),
    RequestKind.INCOMING: (RequestStage.POSTED, (_GO, _WAIT, _CONFIRMED)),
}

FIRST_STATE: Final[dict[RequestKind, RequestStage]] = {
    kind: first for kind, (first, _) in _WAYS.items()
}

TERMINAL: Final = frozenset({RequestStage.DONE, RequestStage.FAILED})

REQUEST_TRANSITIONS: Final[
    dict[tuple[RequestKind, RequestStage, RequestInput], RequestStage]
] = {
    (kind, before, event): after
    for kind, (first, steps) in _WAYS.items()
    for (_, before), (event, after) in pairwise(((RequestInput.GO, first), *steps))
} | {
    (kind, state, RequestInput.FAIL): RequestStage.FAILED
    for kind in RequestKind
    for state in RequestStage
    if state not in TERMINAL
}


class CloseState(Symbol):
    """The states of a connection."""

    OPEN = "open"
    FLUSHING = "flushing"
    CLOSE_SENT = "close sent"
    CLOSE_RECEIVED = "close received"
    CLOSED = "closed"


class CloseInput(Symbol):
    """The inputs of a connection's closing."""

    CLOSE_CALLED = "close called"
    PEER_CLOSED = "peer closed"
    IDLE = "idle"
    LOST = "lost"


# IDLE means that this side has nothing left to deliver; CLOSE is sent in the step that
# IDLE causes.
CLOSE_TRANSITIONS: Final[dict[tuple[CloseState, CloseInput], CloseState]] = {
    (CloseState.OPEN, CloseInput.CLOSE_CALLED): CloseState.FLUSHING,
    (CloseState.OPEN, CloseInput.PEER_CLOSED): CloseState.CLOSE_RECEIVED,
    (CloseState.FLUSHING, CloseInput.CLOSE_CALLED): CloseState.FLUSHING,
    (CloseState.FLUSHING, CloseInput.IDLE): CloseState.CLOSE_SENT,
    (CloseState.FLUSHING, CloseInput.PEER_CLOSED): CloseState.CLOSE_RECEIVED,
    (CloseState.CLOSE_SENT, CloseInput.CLOSE_CALLED): CloseState.CLOSE_SENT,
    (CloseState.CLOSE_SENT, CloseInput.PEER_CLOSED): CloseState.CLOSED,
    (CloseState.CLOSE_RECEIVED, CloseInput.CLOSE_CALLED): CloseState.CLOSE_RECEIVED,
    (CloseState.CLOSE_RECEIVED, CloseInput.IDLE): CloseState.CLOSED,
    (CloseState.CLOSED, CloseInput.CLOSE_CALLED): CloseState.CLOSED,
    (CloseState.CLOSED, CloseInput.LOST): CloseState.CLOSED,
} | {
    (phase, CloseInput.LOST): CloseState.CLOSED
    for phase in CloseState
    if phase is not CloseState.CLOSED
}
