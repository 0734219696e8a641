"""What happens in one seed: the conditions, and who does what when.

A seed makes a plan, and a plan makes one schedule: nothing else is random. Faults are
chosen as in swarm testing: each kind is on or off for a whole seed, since a fault that
is always on hides what needs its absence.

Every step brings dice of its own, so that leaving out one step does not change what the
others do. That is what makes a failing plan shrink.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from kvwire.limits import (
    CHUNK_BYTES_MIN,
    PING_INTERVAL_MIN_S,
    PING_MISSES,
    PING_MISSES_MAX,
    PING_MISSES_MIN,
)
from kvwire.types import TrustMode
from kvwire.wire.handshake_messages import ConnectionParameters

T = TypeVar("T")


class Verb(enum.Enum):
    """What a step does."""

    CONNECT = "connect"
    SEND = "send"
    RECV = "recv"
    GRANT = "grant"
    PUT = "put"
    GET = "get"
    REVOKE = "revoke"
    CLOSE_REGION = "close region"
    OPEN = "open transfer"
    SEGMENT = "mark"
    COMMIT = "commit"
    EXPOSE = "expose"
    OPEN_WINDOW = "open window"
    GET_BLOCKS = "get blocks"
    RENEW = "renew"
    CLOSE_READER = "close window of the peer"
    CLOSE_WINDOW = "close window"
    CANCEL = "cancel"
    WITHDRAW = "withdraw"
    CLOSE = "close"
    ABORT = "abort"
    # Faults of the wire.
    CUT = "cut"
    PARTITION = "partition"
    FLIP = "flip"
    DAMAGE = "damage"
    DROP = "drop"
    DOUBLE = "double"
    SWAP = "swap"
    REFLECT = "reflect"
    REWRITE = "rewrite"
    # Faults of a process.
    CRASH = "crash"
    STALL = "stall"
    CLOCK_JUMP = "clock jump"
    LATE_TIMERS = "late timers"
    STORM = "cancel storm"
    FORGE = "forge"
    AMBUSH = "ambush"


_WORK: Final[dict[Verb, float]] = {
    Verb.SEND: 8,
    Verb.RECV: 7,
    Verb.GRANT: 3,
    Verb.PUT: 5,
    Verb.GET: 5,
    Verb.OPEN: 3,
    Verb.SEGMENT: 5,
    Verb.COMMIT: 2,
    Verb.REVOKE: 0.7,
    Verb.CLOSE_REGION: 0.7,
    Verb.CANCEL: 1.5,
    Verb.WITHDRAW: 0.5,
    Verb.CLOSE: 0.4,
    Verb.ABORT: 0.2,
    Verb.CONNECT: 0.3,
}
# Drawn apart from the others, so that a seed does the rest with windows or without.
_WINDOW_WORK: Final[dict[Verb, float]] = {
    Verb.EXPOSE: 2,
    Verb.OPEN_WINDOW: 4,
    Verb.GET_BLOCKS: 12,
    Verb.RENEW: 5,
    Verb.CLOSE_READER: 0.7,
    Verb.CLOSE_WINDOW: 0.7,
}
_WINDOW_SALT: Final = 0x817D
FAULTS: Final = tuple(verb for verb in Verb if verb not in {**_WORK, **_WINDOW_WORK})
# Faults that a wire with the promises of a link never shows; the core has to notice.
TAMPERING: Final = frozenset(
    {
        *(Verb.FLIP, Verb.DAMAGE, Verb.DROP, Verb.DOUBLE, Verb.SWAP),
        *(Verb.REFLECT, Verb.REWRITE),
    }
)


# No connection outlives these; were they frequent, little else would be tested.
_DEADLY: Final = TAMPERING - {Verb.DAMAGE} | {Verb.CUT, Verb.CRASH, Verb.FORGE}


class Step(NamedTuple):
    """One thing that happens, at seconds of virtual time.

    Attributes:
        dice: All choices that it makes are drawn from this number.
    """

    at: float
    verb: Verb
    node: int
    dice: int


class Dice:
    """Choices drawn from one number."""

    __slots__ = ("_left",)

    def __init__(self, number: int) -> None:
        self._left = number

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``."""
        self._left, drawn = divmod(self._left, count)
        return drawn

    def one_in(self, count: int) -> bool:
        """True once in ``count`` times."""
        return not self.below(count)

    def share(self) -> float:
        """A number from 0 to 1, of two decimals."""
        return self.below(100) / 99

    def pick(self, choices: Sequence[T]) -> T | None:
        """One of these; None if there is none."""
        return choices[self.below(len(choices))] if choices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The conditions of a seed; they hold from its first step to its last.

    Attributes:
        latency_s: Least and greatest time a frame is under way.
        bytes_per_s: What the wire carries; 0 for any number.
        queue_bytes: Payload handed to a link before it is waited for.
        copies: Wires copy what is sent, so that completions come before delivery.
        late: Share of completions that come late, by up to a second.
        stuck: Share of completions that do not come before the link has died.
        gap: Share of payloads that arrive in two pieces with a pause between them.
        silent: Share of broken links of which an end is not told.
        slow: Share of receives that get the memory they ask for late.
        small_tables: Limits of tables so small that a seed can reach them.
    """

    nodes: int
    trust: TrustMode
    parameters: tuple[ConnectionParameters, ...]
    checked: bool
    ping_interval_s: float
    ping_misses: int
    latency_s: tuple[float, float]
    bytes_per_s: float
    queue_bytes: int
    copies: bool
    late: float
    stuck: float
    gap: float
    silent: float
    slow: float
    deadlines: float
    small_tables: bool
    close_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One seed, worked out.

    Attributes:
        end: When faults stop and everything has to come to its end.
    """

    seed: int
    setup: Setup
    steps: tuple[Step, ...]
    end: float

    def has(self, verb: Verb) -> bool:
        """Whether some step of it is of this kind."""
        return any(step.verb is verb for step in self.steps)


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    faults = [
        fault for fault in FAULTS if rng.random() < (0.08 if fault in _DEADLY else 0.25)
    ]
    if rng.random() < 0.15:
        faults = []
    setup = _make_setup(rng, calm=not faults)
    begin = 8 * setup.latency_s[1]
    end = begin + rng.choice((0.05, 0.3, 1.0, 4.0, 15.0))
    weights = {verb: weight * rng.choice((0.3, 1, 2)) for verb, weight in _WORK.items()}
    verbs = rng.choices(list(weights), list(weights.values()), k=rng.randrange(16, 64))
    for fault in faults:
        verbs += [fault] * rng.choice((1, 1, 2))
    steps = [_make_step(rng, verb, setup.nodes, begin, end) for verb in verbs]
    steps += [
        Step(0.0, Verb.CONNECT, node, rng.getrandbits(192))
        for node in range(1, setup.nodes)
    ]
    steps += _window_steps(seed, setup.nodes, begin, end)
    steps.sort(key=lambda step: step.at)
    return Plan(seed=seed, setup=setup, steps=tuple(steps), end=end)


def _window_steps(seed: int, nodes: int, begin: float, end: float) -> list[Step]:
    """What is done with windows, in two seeds of three."""
    rng = random.Random(seed ^ _WINDOW_SALT)
    if rng.random() < 0.33:
        return []
    verbs, weights = list(_WINDOW_WORK), list(_WINDOW_WORK.values())
    chosen = rng.choices(verbs, weights, k=rng.randrange(12, 60))
    # Every node has some from the beginning, and peers that have them open.
    first = (Verb.EXPOSE, Verb.EXPOSE, Verb.OPEN_WINDOW, Verb.OPEN_WINDOW)
    early = begin + 0.1 * (end - begin)
    return [_make_step(rng, verb, nodes, begin, end) for verb in chosen] + [
        _make_step(rng, verb, nodes, begin, early)._replace(node=node)
        for node in range(nodes)
        for verb in first
    ]


def _make_step(
    rng: random.Random, verb: Verb, nodes: int, begin: float, end: float
) -> Step:
    # A third of what changes frames does so while hands are shaken.
    early = verb is Verb.REWRITE or (verb in _DEADLY and rng.random() < 0.3)
    at = 0.0 if early else rng.uniform(begin, end)
    return Step(at, verb, rng.randrange(nodes), rng.getrandbits(192))


def _make_setup(rng: random.Random, *, calm: bool) -> Setup:
    def some(share: float) -> float:
        """``share`` in a third of the seeds, unless nothing may go wrong; else 0."""
        return share if not calm and rng.random() < 0.33 else 0.0

    nodes = rng.choice((2, 2, 2, 3))
    # One seed in eight runs with the smallest chunks that are really allowed.
    chunk_bytes = rng.choice((CHUNK_BYTES_MIN, *(128, 192, 256, 256, 512, 1024, 2048)))
    low_s = rng.choice((0.000_05, 0.001, 0.02))
    # An interval is longer than a ping and its answer may take.
    interval_s = rng.choice(
        (PING_INTERVAL_MIN_S if low_s < 0.02 else 0.5, 0.5, 1.0, 2.0)
    )
    misses = rng.choice((PING_MISSES_MIN, PING_MISSES, PING_MISSES_MAX))
    queue_bytes = chunk_bytes * rng.choice((1, 2, 4))
    # One seed in eight has a wire so slow that a full queue outlasts all patience, and
    # yet fast enough for a handshake.
    slow_link = rng.random() < 0.12
    rate = max(queue_bytes / (interval_s * misses), 512.0)
    return Setup(
        nodes=nodes,
        trust=rng.choice((TrustMode.LOOPBACK, TrustMode.PSK)),
        parameters=tuple(_make_terms(rng, chunk_bytes) for _ in range(nodes)),
        checked=rng.random() < 0.7,
        ping_interval_s=interval_s,
        ping_misses=misses,
        latency_s=(low_s, low_s * rng.choice((1, 3, 8))),
        bytes_per_s=rate if slow_link else 0.0,
        queue_bytes=queue_bytes,
        copies=rng.random() < 0.3,
        late=some(rng.choice((0.3, 1.0))),
        stuck=some(rng.choice((0.1, 1.0))),
        gap=some(0.3),
        silent=some(0.5),
        slow=some(0.5),
        deadlines=rng.choice((0.0, 0.1, 0.5)),
        small_tables=rng.random() < 0.25,
        close_timeout_s=rng.choice((0.5, 5.0)),
    )


# Bits of additions that only a later version knows: nobody minds them.
_LATER: Final = 1 | 1 << 63


def _make_terms(rng: random.Random, chunk_bytes: int) -> ConnectionParameters:
    eager_bytes = rng.choice((0, 64, 100, 1024))
    return ConnectionParameters(
        chunk_bytes=chunk_bytes * rng.choice((1, 1, 2)),
        eager_bytes=eager_bytes,
        window_bytes=eager_bytes * rng.choice((1, 2, 8)),
        window_messages=rng.choice((1, 2, 3, 64)),
        features=rng.choice((0, _LATER, _LATER)),
    )
