"""Schedules: the steps of a test, as plain data made from a seed.

A schedule is a list of steps. A step that is impossible at its position, such as
withdrawing a reference that was never made, is skipped. So every part of a failing
schedule is itself a schedule, and :func:`shrink` finds a small one that still fails.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable
from functools import partial
from itertools import chain
from typing import Final, Literal, TypeVar

import msgspec

T = TypeVar("T")
Verb = Literal[
    "offer",
    "withdraw",
    "get",
    "put",
    "stop",
    "kill",
    "reconnect",
    "pause",
    "idle",
    "cycle",
]
Way = Literal["wait", "cancel", "timeout", "behind"]

WRITERS: Final = {"left": 1, "right": 2}
IDLE_S: Final = 0.3
# The number and size of the slots: small messages, messages of one frame, and messages
# large enough to fill socket buffers, so that operations can be interrupted half-way.
_SHAPES: Final = (
    (8, 4 << 10),
    (8, 64 << 10),
    (8, 512 << 10),
    (4, 4 << 20),
    (4, 4 << 20),
)
_PAUSES_S: Final = (0.0, 0.0, 0.0002, 0.001, 0.005)
_STOPS_S: Final = (0.003, 0.01, 0.03)
# The time that a transport gets after a cancel, before its memory is used again.
_LATE_S: Final = 0.05


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a schedule.

    Attributes:
        verb: The right end runs ``offer`` and ``withdraw``, the left end ``get`` and
            ``put``. ``stop`` stops the right process for a while, and ``kill`` kills
            it. ``reconnect`` closes both ends and opens new ones. ``idle`` does nothing
            and measures the CPU time, ``cycle`` connects many times and checks for
            leaks.
        reference: The number of the reference that it makes or uses.
        slot: The first of its slots: in the right end for an offer, else in the left
            one.
        count: The number of slots in an offer.
        way: How an operation ends: by itself, or in the background of the next steps.
        after_s: The time until it is cancelled or timed out, or the length of a stop or
            pause.
    """

    verb: Verb
    reference: int = 0
    slot: int = 0
    count: int = 1
    way: Way = "wait"
    after_s: float = 0.0

    def __str__(self) -> str:
        """Return the step as text for people."""
        seconds = f" after {self.after_s * 1e3:g} ms" if self.after_s else ""
        way = "" if self.way == "wait" else f", {self.way}{seconds}"
        match self.verb:
            case "offer":
                return f"offer {self.count} slots from {self.slot} as #{self.reference}"
            case "withdraw":
                return f"withdraw #{self.reference} and use its memory again"
            case "get" | "put":
                to = "into" if self.verb == "get" else "from"
                return f"{self.verb} #{self.reference} {to} slot {self.slot}{way}"
            case "stop":
                return f"stop the peer for {self.after_s * 1e3:g} ms"
            case "pause":
                return f"wait {self.after_s * 1e3:g} ms"
            case _:
                return self.verb


class Schedule(msgspec.Struct, frozen=True):
    """Steps, and the division of both ends' memory.

    Attributes:
        seed: The seed that it was made from.
        slots: The number of slots in each memory.
        slot_bytes: The size of each slot.
        steps: The steps, in order.
    """

    seed: int
    slots: int
    slot_bytes: int
    steps: tuple[Step, ...]


def make(seed: int) -> Schedule:
    """Make a seed's schedule; 16 consecutive seeds cover every theme."""
    draw = random.Random(seed)  # noqa: S311 - a seed is meant to repeat
    theme = _THEMES[seed % len(_THEMES)]
    slots, slot_bytes = draw.choice(_SHAPES[-2:] if theme is _cycles else _SHAPES)
    lists = []
    for number in range(1 if theme in (_cycles, _idles) else draw.randint(1, 3)):
        count = draw.randint(1, 2)
        place = draw.randrange(slots - count + 1)
        own = draw.randrange(slots - count + 1)
        offer = Step("offer", number * 2, place, count)
        lists.append([offer, *theme(draw, offer, own)])
    return Schedule(seed, slots, slot_bytes, tuple(_mixed(draw, lists)))


def _mixed(draw: random.Random, lists: list[list[Step]]) -> list[Step]:
    """Interleave lists of steps; each list keeps its order."""
    turns = list(chain.from_iterable([n] * len(some) for n, some in enumerate(lists)))
    draw.shuffle(turns)
    each = [iter(some) for some in lists]
    return [next(each[n]) for n in turns]


# --- themes: what follows an offer ----------------------------------------------------


def _verb(draw: random.Random) -> Literal["get", "put"]:
    return draw.choice(("get", "put"))


def _stop(draw: random.Random) -> list[Step]:
    """Perhaps stop the peer, so that the next step interrupts an operation."""
    return [Step("stop", after_s=draw.choice(_STOPS_S))] if draw.random() < 0.6 else []


def _again(draw: random.Random, offer: Step, own: int) -> list[Step]:
    """Use the same memory and its reference again."""
    number = offer.reference
    fresh = msgspec.structs.replace(offer, reference=number + 1)
    return [
        Step("withdraw", number),
        fresh,
        Step("get", number + 1, own),
        Step("get", number, own),
    ]


def _plain(draw: random.Random, offer: Step, own: int) -> list[Step]:
    verbs = [Step(_verb(draw), offer.reference, own) for _ in range(3)]
    return [*verbs, *_again(draw, offer, own)]


def _ended(draw: random.Random, offer: Step, own: int, way: Way) -> list[Step]:
    after_s = draw.choice(_PAUSES_S) if way == "cancel" else draw.choice(_PAUSES_S[2:])
    step = Step(_verb(draw), offer.reference, own, way=way, after_s=after_s)
    stop = _stop(draw)
    get = Step("get", offer.reference, own)
    after = get if draw.random() < 0.5 else Step("pause", after_s=_LATE_S)
    return [*stop, step, after, *_again(draw, offer, own)]


def _deaths(draw: random.Random, offer: Step, own: int) -> list[Step]:
    step = Step(_verb(draw), offer.reference, own, way="behind")
    new = msgspec.structs.replace(offer, reference=offer.reference + 1)
    get = Step("get", new.reference, own)
    return [
        *_stop(draw),
        step,
        Step("kill"),
        Step("get", offer.reference, own),
        new,
        get,
    ]


def _reconnects(draw: random.Random, offer: Step, own: int) -> list[Step]:
    step = Step(_verb(draw), offer.reference, own, way="behind")
    new = msgspec.structs.replace(offer, reference=offer.reference + 1)
    get = Step("get", new.reference, own)
    return [*_stop(draw), step, Step("reconnect"), new, get]


def _torn(draw: random.Random, offer: Step, own: int) -> list[Step]:
    step = Step(_verb(draw), offer.reference, own, way="behind")
    pause = draw.choice(_PAUSES_S)
    return [
        *_stop(draw),
        step,
        Step("pause", after_s=pause),
        *_again(draw, offer, own),
    ]


def _idles(draw: random.Random, offer: Step, own: int) -> list[Step]:
    return [Step("get", offer.reference, own), Step("idle")]


def _cycles(draw: random.Random, offer: Step, own: int) -> list[Step]:
    return [Step("cycle", count=6)]


_cancels = partial(_ended, way="cancel")
_timeouts = partial(_ended, way="timeout")
_THEMES: Final = (
    _plain,
    _cancels,
    _timeouts,
    _torn,
    _deaths,
    _cancels,
    _torn,
    _plain,
    _reconnects,
    _cancels,
    _timeouts,
    _torn,
    _idles,
    _cycles,
    _torn,
    _plain,
)


# --- smaller --------------------------------------------------------------------------


def effective(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Leave out the steps that use a reference which no step before them has made."""
    made: set[int] = set()
    kept = []
    for step in steps:
        if step.verb == "offer":
            made.add(step.reference)
        if step.verb not in {"get", "put", "withdraw"} or step.reference in made:
            kept.append(step)
    return tuple(kept)


def shrink(steps: tuple[T, ...]) -> Generator[tuple[T, ...], bool, None]:
    """Remove steps as long as the rest fails in the same way.

    It first removes half of the steps at once, then fewer, down to single steps (delta
    debugging, Zeller 1999).

    Args:
        steps: The steps of a schedule that fails.

    Yields:
        Shorter lists of steps; send back whether each fails in the same way.
    """
    size = max(1, len(steps) // 2)
    while size:
        for start in range(0, len(steps), size):
            fewer = steps[:start] + steps[start + size :]
            if (yield fewer):
                steps = fewer
                break
        else:
            size //= 2
