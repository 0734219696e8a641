"""Every state of a KV transfer and of its legs, and every step between them.

Rule 1: every transition is defined in this file. Rule 2: both ends use the same tables.
A step that is not listed does not exist: requesting it is a bug.

A transfer is one end, over all peers and links. A leg is one peer's part of it, over
all links (on one link, kvwire.proto.state calls that a request).

States of a transfer:

* NEW: created and checked; observers do not know it yet.
* DOOMED: ended while the request was being sent; observers have yet to be called.
* OPEN: running, or waiting for its peers; its deadline applies.
* ENDING: it gets an outcome as soon as there is memory for it and the landed parts are
  decoded. Nothing new begins; legs only report the end.
* ENDED: it has an outcome. Links may still touch its memory.
* DRAINED: kvwire can no longer touch its memory.

Inputs of a transfer:

* BEGIN: the peer has been asked, or may ask now; observers have been called.
* END: delivered, aborted, expired, refused or finally lost.
* RECORD: the outcome was made.
* DRAIN: the last of its buffers is free.

States of a leg:

* ASKED: one side has asked for the transfer, and the other has not agreed.
* MOVING: both have agreed on a plan; segments may move.
* SETTLED: the consumer has everything that will arrive; no segment may move any more.
  On the consumer's side: the producer does not know that yet.
* COMMITTED: the producer has announced the end of its segments, and waits for the
  consumer.
* REFUSED: this side has ended it. The link may be lost before the peer gets to know.
  Frames that the peer has sent before it knew change nothing.
* LOST: its link is lost, and may still touch memory.
* WAITING: that link can no longer touch memory; another link may carry the leg.
* OVER: it has ended, and the peer knows.

Inputs of a leg:

* AGREE: the two plans are equal; or the transfer has ended on this side, and the result
  is about to be sent to the peer.
* SETTLE: everything that the producer committed has arrived, or the consumer reports
  so.
* COMMIT: no more marks will follow.
* REFUSE: this side ends it.
* LOSE: the link was lost, and another link may carry the leg.
* RELEASE: the lost link can no longer touch memory.
* RESUME: another link carries the leg.
* END: its request has finally ended.
"""

from __future__ import annotations

from typing import Final

from kvwire.types import Symbol, Transitions


class TransferState(Symbol):
    """The states of one end of a transfer."""

    NEW = "new"
    DOOMED = "doomed"
    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"
    DRAINED = "drained"


class TransferInput(Symbol):
    """The inputs of the state machine of one end of a transfer."""

    BEGIN = "begin"
    END = "end"
    RECORD = "record"
    DRAIN = "drain"


# It does not continue, whether or not it has an outcome yet.
OVER: Final = frozenset(
    {TransferState.ENDING, TransferState.ENDED, TransferState.DRAINED}
)

TRANSFER_TRANSITIONS: Final = Transitions[TransferState, TransferInput](
    "a transfer",
    {
        (TransferState.NEW, TransferInput.BEGIN): TransferState.OPEN,
        (TransferState.NEW, TransferInput.END): TransferState.DOOMED,
        (TransferState.DOOMED, TransferInput.BEGIN): TransferState.ENDING,
        (TransferState.OPEN, TransferInput.END): TransferState.ENDING,
        (TransferState.ENDING, TransferInput.RECORD): TransferState.ENDED,
        (TransferState.ENDED, TransferInput.DRAIN): TransferState.DRAINED,
    },
)


class LegState(Symbol):
    """The states of a leg."""

    ASKED = "asked"
    MOVING = "moving"
    SETTLED = "settled"
    COMMITTED = "committed"
    REFUSED = "refused"
    LOST = "lost"
    WAITING = "waiting"
    OVER = "over"


class LegInput(Symbol):
    """The inputs of a leg's state machine."""

    AGREE = "agree"
    SETTLE = "settle"
    COMMIT = "commit"
    REFUSE = "refuse"
    LOSE = "lose"
    RELEASE = "release"
    RESUME = "resume"
    END = "end"


# A link carries the leg.
ON_LINK: Final = frozenset(
    {LegState.ASKED, LegState.MOVING, LegState.SETTLED, LegState.COMMITTED}
)
# It continues if there is another link.
OFF_LINK: Final = frozenset({LegState.LOST, LegState.WAITING})
# The peer may not know how it ended.
UNNOTIFIED: Final = OFF_LINK | {LegState.REFUSED}

LEG_TRANSITIONS: Final = Transitions[LegState, LegInput](
    "a leg",
    {
        (LegState.ASKED, LegInput.AGREE): LegState.MOVING,
        (LegState.MOVING, LegInput.SETTLE): LegState.SETTLED,
        (LegState.MOVING, LegInput.COMMIT): LegState.COMMITTED,
        # A producer may commit after the consumer has settled on an earlier link.
        (LegState.SETTLED, LegInput.COMMIT): LegState.COMMITTED,
        (LegState.LOST, LegInput.RELEASE): LegState.WAITING,
        (LegState.WAITING, LegInput.RESUME): LegState.ASKED,
        # Each refusal is followed by the end of the request.
        (LegState.REFUSED, LegInput.END): LegState.REFUSED,
    }
    | {(state, LegInput.REFUSE): LegState.REFUSED for state in ON_LINK}
    | {(state, LegInput.LOSE): LegState.LOST for state in ON_LINK}
    | {(state, LegInput.END): LegState.OVER for state in ON_LINK},
)
