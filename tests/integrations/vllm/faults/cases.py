"""The faults: each asks an arena so many times, and does something to it meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Final

from tests.integrations.vllm.faults.answers import Reference
from tests.integrations.vllm.faults.arena import LEASE_S, Arena, Params
from tests.integrations.vllm.serving import Engine

# Longer than a packet is sent again for, shorter than a lease; and longer than one.
SHORT_S: Final = 2.0
LONG_S: Final = LEASE_S + 4.0
# References that nobody has used yet: their blocks fill half of an engine.
HELD: Final = 20
_PATIENCE_S: Final = (0.05, 0.2, 0.6)


def nothing(arena: Arena, count: int) -> None:
    """No fault."""
    arena.together(count, arena.through)


def unknown_id(arena: Arena, count: int) -> None:
    """The request that a reference names has never been."""
    _changed(arena, count, arena.unknown)


def out_of_range(arena: Arena, count: int) -> None:
    """The numbers of a reference mean nothing."""
    _changed(arena, count, arena.out_of_range)


def consumed(arena: Arena, count: int) -> None:
    """A reference is used a second time, when others have computed since."""

    def ask(number: int) -> None:
        known = arena.known(number)
        params = arena.prefilled(known)
        arena.decoded(known, _copy(params))
        arena.through(number + 7)
        arena.decoded(known, params)

    arena.together(count // 3, ask)


def stale(arena: Arena, count: int) -> None:
    """A reference is used when its lease is over and its blocks are another's."""
    _old(arena, count, lambda: arena.together(4 * HELD, _computed(arena)))


def lease(arena: Arena, count: int) -> None:
    """A reference is used when its lease is over."""
    _old(arena, count, None)


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


def killed_prefill(arena: Arena, count: int) -> None:
    """SIGKILL of prefill while KV flies; it comes back on the same port."""
    _killed(arena, count, arena.prefill)


def killed_decode(arena: Arena, count: int) -> None:
    """SIGKILL of decode while KV flies; it comes back on the same port."""
    _killed(arena, count, arena.decode)


def restarted(arena: Arena, count: int) -> None:
    """References from before prefill was restarted on the same port."""
    waiting = _references(arena)
    arena.restart(arena.prefill)
    _use(arena, waiting)
    arena.together(count - len(waiting), arena.through)


def stopped(arena: Arena, count: int) -> None:
    """SIGSTOP of prefill for longer than a lease, and SIGCONT."""

    def harm() -> None:
        with arena.stopped(arena.prefill):
            _pause(LONG_S)

    with arena.slow():
        arena.together(count, arena.through, harm)


def cut(arena: Arena, count: int) -> None:
    """No packet arrives for a while, either way."""
    _cut(arena, count, SHORT_S, 0, 1)


def long_cut(arena: Arena, count: int) -> None:
    """Likewise, for longer than a lease."""
    _cut(arena, count, LONG_S, 0, 1)


def half_open(arena: Arena, count: int) -> None:
    """Only what decode sends arrives, for longer than a lease."""
    _cut(arena, count, LONG_S, 0)


def slow(arena: Arena, count: int) -> None:
    """A wire of 4 MB/s."""
    with arena.slow():
        arena.together(count, arena.through)


CASES: Final[dict[str, Callable[[Arena, int], None]]] = {
    "no fault": nothing,
    "unknown id": unknown_id,
    "out of range": out_of_range,
    "consumed reference": consumed,
    "stale reference, blocks used again": stale,
    "lease over": lease,
    "clients leave while KV flies": abort,
    "slow wire": slow,
    "network cut, 2 s": cut,
    "network cut, 10 s": long_cut,
    "half-open, 10 s": half_open,
    "SIGSTOP for 10 s, SIGCONT": stopped,
    "SIGKILL of prefill": killed_prefill,
    "SIGKILL of decode": killed_decode,
    "restart, same port": restarted,
}


def _changed(
    arena: Arena, count: int, change: Callable[[Params | None], Params | None]
) -> None:
    """Change every second reference; the others are harmed or not."""

    def ask(number: int) -> None:
        known = arena.known(number)
        params = arena.prefilled(known)
        arena.decoded(known, change(params) if number % 2 else params)

    arena.together(count, ask)


def _old(arena: Arena, count: int, between: Callable[[], None] | None) -> None:
    """Take references, use them when their lease is over."""
    for _ in range(-(-count // HELD)):
        waiting = _references(arena)
        _pause(LEASE_S + 2.0)
        if between is not None:
            between()
        _use(arena, waiting)


def _references(arena: Arena) -> list[tuple[Reference, Params | None]]:
    """References that nobody uses yet."""
    known = [arena.known(number) for number in range(HELD)]
    return [(one, arena.prefilled(one)) for one in known]


def _use(arena: Arena, waiting: Sequence[tuple[Reference, Params | None]]) -> None:
    arena.together(len(waiting), lambda at: arena.decoded(*waiting[at]))


def _computed(arena: Arena) -> Callable[[int], object]:
    """Have prefill compute prompts that nobody fetches the KV of."""
    return lambda number: arena.alone(number + 11)


def _killed(arena: Arena, count: int, engine: Engine) -> None:
    with arena.slow():
        arena.together(count, arena.through, lambda: arena.restart(engine))


def _cut(arena: Arena, count: int, seconds: float, *ways: int) -> None:
    def harm() -> None:
        with arena.cut(*ways):
            _pause(seconds)

    arena.together(count, arena.through, harm)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _copy(params: Params | None) -> Params | None:
    return dict(params) if params else params
