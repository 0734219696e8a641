"""Every state of a KV transfer and of its attempts, and every step between them.

Rule 1: what decides a transition stands in this file. Rule 2: the tables do not know
which end runs them. A step that is not listed does not exist: asking for it is a bug.

A transfer is one end, over all links. An attempt is what one peer gets of it, or sends
to it, on the link that carries it now (kvwire.proto.state calls that a request).

States of a transfer:

* NEW: made and checked; no observer knows of it.
* DOOMED: ended while its peer was being asked; observers hear of it first.
* OPEN: under way, or waiting for its peers; its deadline counts.
* ENDING: it will have an outcome as soon as there is memory for one, and what has
  landed of it is decoded.
* ENDED: it has an outcome. Links may still touch its memory.
* DRAINED: nothing of kvwire can touch its memory any more.

Inputs of a transfer:

* BEGIN: the peer has been asked, or may ask; observers know.
* END: delivered, aborted, expired, refused, lost for good.
* RECORD: the outcome is made.
* DRAIN: the last of its buffers is free.

States of an attempt:

* ASKED: one side has asked for the transfer, and the other has not agreed.
* MOVING: both have agreed on a plan; segments may move.
* SETTLED: the consumer has all that comes; no segment may move any more. On its side
  the producer does not know that yet.
* COMMITTED: the producer has said that nothing more comes, and waits for the consumer.
* REFUSED: this side has ended it. Whether the peer hears of that before its link is
  lost is unknown. What the peer still says changes nothing.
* LOST: its link is lost, and may still touch memory.
* WAITING: that link has touched memory for the last time; another one may carry it on.
* OVER: it ended, and the peer knows.

Inputs of an attempt:

* AGREE: the two plans are the same.
* SETTLE: all that the producer has committed is here, or the consumer says so.
* COMMIT: no mark will come any more.
* REFUSE: this side ends it.
* LOSE: the link was lost, and the transfer goes on with another.
* RELEASE: the lost link has touched memory for the last time.
* RESUME: another link carries it on.
* END: its request is over for good.
"""

from __future__ import annotations

from typing import Final

from kvwire.types import Symbol, Transitions


class TransferState(Symbol):
    """Names how far one end of a transfer is."""

    NEW = "new"
    DOOMED = "doomed"
    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"
    DRAINED = "drained"


class TransferInput(Symbol):
    """Names what can happen to one end of a transfer."""

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


class AttemptState(Symbol):
    """Names how far an attempt is."""

    ASKED = "asked"
    MOVING = "moving"
    SETTLED = "settled"
    COMMITTED = "committed"
    REFUSED = "refused"
    LOST = "lost"
    WAITING = "waiting"
    OVER = "over"


class AttemptInput(Symbol):
    """Names what can happen to an attempt."""

    AGREE = "agree"
    SETTLE = "settle"
    COMMIT = "commit"
    REFUSE = "refuse"
    LOSE = "lose"
    RELEASE = "release"
    RESUME = "resume"
    END = "end"


# A link carries the attempt.
ON_LINK: Final = frozenset(
    {
        AttemptState.ASKED,
        AttemptState.MOVING,
        AttemptState.SETTLED,
        AttemptState.COMMITTED,
    }
)
# It goes on if another link comes.
OFF_LINK: Final = frozenset({AttemptState.LOST, AttemptState.WAITING})
# The peer may not have heard how it ended.
UNNOTIFIED: Final = OFF_LINK | {AttemptState.REFUSED}

ATTEMPT_TRANSITIONS: Final = Transitions[AttemptState, AttemptInput](
    "an attempt",
    {
        (AttemptState.ASKED, AttemptInput.AGREE): AttemptState.MOVING,
        (AttemptState.MOVING, AttemptInput.SETTLE): AttemptState.SETTLED,
        (AttemptState.MOVING, AttemptInput.COMMIT): AttemptState.COMMITTED,
        # A producer commits to a consumer that settled on an earlier link.
        (AttemptState.SETTLED, AttemptInput.COMMIT): AttemptState.COMMITTED,
        (AttemptState.LOST, AttemptInput.RELEASE): AttemptState.WAITING,
        (AttemptState.WAITING, AttemptInput.RESUME): AttemptState.ASKED,
        # Words that were under way when this side ended it.
        (AttemptState.REFUSED, AttemptInput.AGREE): AttemptState.REFUSED,
        (AttemptState.REFUSED, AttemptInput.SETTLE): AttemptState.REFUSED,
        (AttemptState.REFUSED, AttemptInput.END): AttemptState.REFUSED,
    }
    | {(state, AttemptInput.REFUSE): AttemptState.REFUSED for state in ON_LINK}
    | {(state, AttemptInput.LOSE): AttemptState.LOST for state in ON_LINK}
    | {(state, AttemptInput.END): AttemptState.OVER for state in ON_LINK},
)
