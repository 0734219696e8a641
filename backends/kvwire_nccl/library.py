"""What moves the bytes of a lane, NCCL or what tests put in its place: two pipes.

A lane has one for each direction. A single communicator would do its operations in one
order on both sides, and the two sides do not know each other's: each could wait in a
send for the other's receive, for ever. In one direction alone the order is that of the
descriptors.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from kvwire.backend import Payload
from kvwire.errors import KVWireError, UsageError
from kvwire.types import MemoryKind

# NCCL's first communicator of a process loads kernels and looks for networks: seconds.
_START_TIMEOUT_S: Final = 20.0
# Nothing moves for so long only where the peer is gone, and that is known earlier.
_MOVE_TIMEOUT_S: Final = 30.0


class MoveFailed(KVWireError):
    """Reports an error of the communicator, which is undefined from then on."""


class MoveProgress(enum.Enum):
    """Names how far one movement is."""

    QUEUED = "queued"
    """The library has not taken it yet: nothing else may be given to it."""
    LAUNCHED = "launched"
    DONE = "done"


class Move(ABC):
    """Follows one payload under way."""

    @abstractmethod
    def progress(self) -> MoveProgress:
        """Return how far it is, or raise: it failed, and with it the communicator."""


class Pipe(ABC):
    """Sends, or receives, all payloads of one direction.

    All methods are called by one thread, the direction's own, and by no other. They
    raise whatever the library raises. None waits for the peer but :meth:`abort`.
    """

    @abstractmethod
    def begin(self) -> None:
        """Start to come up with the peer."""

    @abstractmethod
    def is_up(self) -> bool:
        """Tell whether it has come up."""

    @abstractmethod
    def move(self, payload: Payload | None, nbytes: int) -> Move:
        """Send a payload, or receive one; None receives and drops."""

    @abstractmethod
    def check(self) -> None:
        """Look for errors that no movement reports, and raise the one that is there."""

    @abstractmethod
    def abort(self) -> None:
        """End it, finished or not; raise where that cannot be proved.

        Returns once nothing touches any memory, as late as that may be.
        """


class CollectiveLibrary(ABC):
    """Wraps a library that makes the directions of lanes.

    Attributes:
        version: Its name and version, which must be the same on both sides.
        kinds: Memory that it moves.
        start_timeout_s: How long a direction may take to come up.
        move_timeout_s: How long it may take until the next payload under way is done.
    """

    version: str
    kinds: frozenset[MemoryKind]
    start_timeout_s: float = _START_TIMEOUT_S
    move_timeout_s: float = _MOVE_TIMEOUT_S

    @abstractmethod
    def name(self) -> bytes:
        """Return a new name of a direction; both sides open it with it."""

    @abstractmethod
    def open(self, name: bytes, sends: bool) -> Pipe:
        """Open one end of the named direction; await nothing yet."""

    def close(self) -> None:
        """Let go of what names were made with; every direction has ended."""
        return


START: Final = "start_timeout_s"
MOVE: Final = "move_timeout_s"


def chosen(settings: Mapping[str, str]) -> CollectiveLibrary:
    """Return the library that a user's settings ask for.

    ``device``: the number of the GPU; ``start_timeout_s`` and ``move_timeout_s``:
    seconds.
    """
    from kvwire_nccl.nccl import Nccl  # noqa: PLC0415 - loads CUDA

    library = Nccl(int(_number("device", settings.get("device", "0"))))
    library.start_timeout_s = _number(START, settings.get(START, "20"))
    library.move_timeout_s = _number(MOVE, settings.get(MOVE, "30"))
    return library


def _number(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 86_400:
        raise UsageError(f"backends.nccl: {key}={text!r} is no number of 0 to 86,400")
    return number
