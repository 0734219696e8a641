"""Every state of a KV transfer and of its legs, and every step between them.

Rule 1: everything that decides a transition is in this file. Rule 2: the tables are the
same for both ends. A step that is not listed does not exist: asking for it is a bug.

A transfer is one end, over all peers and links. A leg is one peer's part of it, over
all links (on one link, kvwire.proto.state calls that a request).

States of a transfer:

* NEW: made and checked; no observer knows of it.
* DOOMED: ended while its peer was being asked; observers learn of it first.
* OPEN: under way, or waiting for its peers; its deadline counts.
* ENDING: it gets an outcome as soon as there is memory for one, and its landed parts
  are decoded. Nothing new begins for it; a leg only reports its end.
* ENDED: it has an outcome. Links may still touch its memory.
* DRAINED: kvwire can no longer touch its memory.

Inputs of a transfer:

* BEGIN: the peer has been asked, or may ask; observers know.
* END: delivered, aborted, expired, refused, lost for good.
* RECORD: the outcome is made.
* DRAIN: the last of its buffers is free.

States of a leg:

* ASKED: one side has asked for the transfer, and the other has not agreed.
* MOVING: both have agreed on a plan; segments may move.
* SETTLED: the consumer has all that comes; no segment may move any more. On its side
  the producer does not know that yet.
* COMMITTED: the producer has sent that nothing more comes, and waits for the consumer.
* REFUSED: this side has ended it. Whether the peer learns of that before its link is
  lost is unknown. What the peer has sent before it knew changes nothing.
* LOST: its link is lost, and may still touch memory.
* WAITING: that link has touched memory for the last time; another one may carry it on.
* OVER: it ended, and the peer knows.

Inputs of a leg:

* AGREE: the two plans are the same; or the transfer is over on this side, and the peer
  is about to learn how it ended.
* SETTLE: all that the producer has committed is here, or the consumer reports that.
* COMMIT: no mark will come any more.
* REFUSE: this side ends it.
* LOSE: the link was lost, and the leg goes on with another.
* RELEASE: the lost link has touched memory for the last time.
* RESUME: another link carries it on.
* END: its request is over for good.
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


# It goes on no more, whether it has an outcome yet or not.
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
# It goes on if another link comes.
OFF_LINK: Final = frozenset({LegState.LOST, LegState.WAITING})
# The peer may not know how it ended.
UNNOTIFIED: Final = OFF_LINK | {LegState.REFUSED}

LEG_TRANSITIONS: Final = Transitions[LegState, LegInput](
    "a leg",
    {
        (LegState.ASKED, LegInput.AGREE): LegState.MOVING,
        (LegState.MOVING, LegInput.SETTLE): LegState.SETTLED,
        (LegState.MOVING, LegInput.COMMIT): LegState.COMMITTED,
        # A producer commits to a consumer that settled on an earlier link.
        (LegState.SETTLED, LegInput.COMMIT): LegState.COMMITTED,
        (LegState.LOST, LegInput.RELEASE): LegState.WAITING,
        (LegState.WAITING, LegInput.RESUME): LegState.ASKED,
        # The end of its request follows each refusal.
        (LegState.REFUSED, LegInput.END): LegState.REFUSED,
    }
    | {(state, LegInput.REFUSE): LegState.REFUSED for state in ON_LINK}
    | {(state, LegInput.LOSE): LegState.LOST for state in ON_LINK}
    | {(state, LegInput.END): LegState.OVER for state in ON_LINK},
)
