"""The faults: each asks an arena so many times, and does something to it meanwhile."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from packages.vllm.tests.programs.faults.answers import Reference
from packages.vllm.tests.programs.faults.arena import (
    LEASE_S,
    Arena,
    Contender,
    Forge,
    Params,
)

# Longer than a packet is sent again for, shorter than a lease; and longer than one.
SHORT_S: Final = 2.0
LONG_S: Final = LEASE_S + 4.0
# References that nobody has used yet: their blocks fill half of an engine.
HELD: Final = 20
_PATIENCE_S: Final = (0.05, 0.2, 0.6)

# At its end prefill has as many seconds of work to do.
CROWDED_S: Final = 10.0
CROWDED: Final = "twice what prefill can"
NO_FAULT: Final = "no fault"
COMPUTED_ONCE: Final = (NO_FAULT, CROWDED)
"""Faults in which decode has nothing of a prompt to compute."""

Case = Callable[[Arena, int], None]


def consumed(arena: Arena, count: int) -> None:
    """A reference is used a second time, when others have computed since."""

    def ask(number: int) -> None:
        known = arena.known(number)
        params = arena.prefilled(known)
        arena.decoded(known, dict(params) if params else params)
        arena.through(number + 7)
        arena.decoded(known, params)

    arena.together(count // 3, ask)


def stale(arena: Arena, count: int) -> None:
    """A reference is used when its lease is over and its blocks are another's."""
    old(arena, count, meanwhile=4 * HELD)


def old(arena: Arena, count: int, meanwhile: int = 0) -> None:
    """References are used when their lease is over; meanwhile others compute."""
    for _ in range(-(-count // HELD)):
        waiting = _references(arena)
        _pause(LEASE_S + 2.0)
        arena.together(meanwhile, lambda number: arena.alone(number + 11))
        arena.together(HELD, lambda at: arena.decoded(*waiting[at]))  # noqa: B023


def restarted(arena: Arena, count: int) -> None:
    """References from before prefill was restarted on the same port."""
    waiting = _references(arena)
    arena.restart(arena.prefill)
    arena.together(HELD, lambda at: arena.decoded(*waiting[at]))
    arena.together(count - HELD, arena.through)


def abort(arena: Arena, count: int) -> None:
    """Clients leave while KV flies; who comes next gets their blocks."""

    def ask(number: int) -> None:
        chance = random.Random(number)
        known = arena.known(number)
        params = arena.prefilled(known)
        if number % 2:
            arena.decoded(known, params, chance.choice(_PATIENCE_S))
        else:
            arena.decoded(known, params)

    with arena.slow():
        arena.together(count, ask)


def slow(arena: Arena, count: int) -> None:
    """A wire of 4 MB/s."""
    with arena.slow():
        arena.together(count, arena.through)


def crowded(arena: Arena, count: int) -> None:
    """Long prompts, twice as fast as prefill can compute them.

    For so long that decode waits for more than it does for what was published once.
    """
    rate = 2 * arena.rate()
    asked = arena.long_ones(max(count, math.ceil(rate * CROWDED_S)))
    arena.arriving(len(asked), lambda number: arena.routed(asked[number]), rate)


def forged(forge_of: Callable[[Contender], Forge]) -> Case:
    """Change every second reference; the others are harmed or not."""

    def case(arena: Arena, count: int) -> None:
        forge = forge_of(arena.contender)

        def ask(number: int) -> None:
            known = arena.known(number)
            params = arena.prefilled(known)
            if params and number % 2:
                params = forge(params, arena.signer)
            arena.decoded(known, params)

        arena.together(count, ask)

    return case


def harmed(harm: Callable[[Arena], None]) -> Case:
    """Do something while KV flies over a slow wire."""

    def case(arena: Arena, count: int) -> None:
        with arena.slow():
            arena.together(count, arena.through, lambda: harm(arena))

    return case


def during(fault: Callable[[Arena], AbstractContextManager[None]], s: float) -> Case:
    def case(arena: Arena, count: int) -> None:
        def harm() -> None:
            with fault(arena):
                _pause(s)

        arena.together(count, arena.through, harm)

    return case


def stopped(arena: Arena) -> None:
    """Stop prefill for longer than a lease."""
    with arena.prefill.stopped():
        _pause(LONG_S)


CASES: Final[dict[str, Case]] = {
    NO_FAULT: lambda arena, count: arena.together(count, arena.through),
    "unknown id": forged(lambda contender: contender.unknown),
    "out of range": forged(lambda contender: contender.out_of_range),
    "consumed reference": consumed,
    "stale reference, blocks used again": stale,
    "lease over": old,
    "clients leave while KV flies": abort,
    "slow wire": slow,
    CROWDED: crowded,
    "network cut, 2 s": during(lambda arena: arena.cut(0, 1), SHORT_S),
    "network cut, 10 s": during(lambda arena: arena.cut(0, 1), LONG_S),
    # Only what decode sends arrives.
    "half-open, 10 s": during(lambda arena: arena.cut(0), LONG_S),
    "SIGSTOP for 10 s, SIGCONT": harmed(stopped),
    "SIGKILL of prefill": harmed(lambda arena: arena.restart(arena.prefill)),
    "SIGKILL of decode": harmed(lambda arena: arena.restart(arena.decode)),
    "restart, same port": restarted,
}


def _references(arena: Arena) -> list[tuple[Reference, Params | None]]:
    known = [arena.known(number) for number in range(HELD)]
    return [(one, arena.prefilled(one)) for one in known]


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
