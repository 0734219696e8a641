"""One direction between two processes: what a lane asks of NCCL, or of a stand-in.

A lane has two of these, one for each direction. A single communicator would do its
operations in one order on both sides, and the two sides do not know each other's: each
could wait in a send for the other's receive, for ever. In one direction alone the order
is that of the descriptors.

All methods are called by one thread, the direction's own, and by no other. None of them
waits for the peer but :meth:`Pipe.abort`, which returns when nothing touches any
memory: as late as that may be.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

from kvwire.backend import Payload
from kvwire.errors import KVWireError


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
        """Return how far it is; never blocks.

        Raises:
            Exception: It failed, and with it the communicator.
        """


class Pipe(ABC):
    """Sends, or receives, all payloads of one direction."""

    @abstractmethod
    def begin(self) -> None:
        """Start to come up with the peer.

        Raises:
            Exception: It cannot.
        """

    @abstractmethod
    def is_up(self) -> bool:
        """Tell whether it has come up.

        Raises:
            Exception: It will not.
        """

    @abstractmethod
    def move(self, payload: Payload | None, nbytes: int) -> Move:
        """Send a payload, or receive one; None receives and drops.

        Raises:
            Exception: The communicator failed.
        """

    @abstractmethod
    def check(self) -> None:
        """Look for errors that no movement reports.

        Raises:
            Exception: There is one.
        """

    @abstractmethod
    def abort(self) -> None:
        """End it, finished or not; returns once nothing touches any memory.

        Raises:
            Exception: That cannot be proved.
        """
