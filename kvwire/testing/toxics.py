"""What a bad network does to the bytes of a connection, as values.

Printed when a test fails, they can be pasted into the next. Positions are bytes of one
direction since its connection began, so a toxic hits the same byte each time, however
the stream was cut into reads.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class Direction(enum.Enum):
    """Which way bytes go; the client is whoever connects to the proxy."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"

    @property
    def opposite(self) -> Direction:
        """The other way."""
        return _OPPOSITE[self]

    def __repr__(self) -> str:
        return f"Direction.{self.name}"


_OPPOSITE = {
    Direction.TO_SERVER: Direction.TO_CLIENT,
    Direction.TO_CLIENT: Direction.TO_SERVER,
}


class Ending(enum.Enum):
    """How a cut ends a connection."""

    FIN = "fin"
    """Both sides see the end of the stream."""
    RST = "rst"
    """Both sides see a reset."""
    HALF_CLOSE = "half close"
    """The receiver of this direction sees the end of its stream, and nothing else."""
    SILENCE = "silence"
    """Nothing of this direction arrives any more, its end and its resets included."""

    def __repr__(self) -> str:
        return f"Ending.{self.name}"


@dataclass(frozen=True, slots=True)
class Latency:
    """Bytes arrive ``delay_s`` later, and up to ``jitter_s`` more, in order."""

    direction: Direction
    delay_s: float
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """No more than so many bytes arrive in a second."""

    direction: Direction
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes arrive in pieces of ``nbytes``, each in a packet of its own."""

    direction: Direction
    nbytes: int = 1


@dataclass(frozen=True, slots=True)
class Pause:
    """Once ``at`` bytes have arrived none does for ``pause_s``; then all at once."""

    direction: Direction
    at: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of the byte at position ``at`` arrives inverted."""

    direction: Direction
    at: int
    bit: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """Exactly ``at`` bytes arrive; then the connection ends as ``ending`` says."""

    direction: Direction
    at: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class Deaf:
    """Connections are accepted, and that is all."""


Toxic = Latency | Bandwidth | Slice | Pause | Flip | Cut | Deaf


def schedule(seed: int, *, reach_bytes: int) -> tuple[Toxic, ...]:
    """Mix toxics by a seed; at most one of them ends the connection.

    Args:
        seed: Chooses the mix.
        reach_bytes: Positions are below this.
    """
    rng = random.Random(f"toxics {seed}")  # noqa: S311 - no secret
    found: list[Toxic] = []
    for way in Direction:
        if rng.random() < 0.3:
            found.append(Latency(way, rng.uniform(0, 0.002), rng.uniform(0, 0.002)))
        if rng.random() < 0.2:
            found.append(Bandwidth(way, rng.uniform(2e6, 2e8)))
        if rng.random() < 0.3:
            found.append(Slice(way, rng.choice((33, 1000, 40_000))))
        if rng.random() < 0.3:
            found.append(Pause(way, rng.randrange(reach_bytes), rng.uniform(0, 0.02)))
        if rng.random() < 0.2:
            found.append(Flip(way, rng.randrange(reach_bytes), rng.randrange(8)))
    if rng.random() < 0.5:
        way, ending = rng.choice(list(Direction)), rng.choice(list(Ending))
        found.append(Cut(way, rng.randrange(reach_bytes), ending))
    return tuple(found)
