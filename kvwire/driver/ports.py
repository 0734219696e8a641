"""The driver of a connection, as the paths of its payload see it."""

from __future__ import annotations

from typing import Protocol

from kvwire.backend import Link
from kvwire.driver.lanes.state import LaneEndpoint, LaneSet
from kvwire.driver.services import Services
from kvwire.proto.connection import ConnectionCore


class PathOwner(Protocol):
    """Stands for :class:`ConnectionDriver`, which owns staging and lanes.

    Attributes:
        core: Decides what is sent, and what an arrived frame means.
        link: The control link.
        lanes: How far each lane is.
        services: What the parts of the communicator share.
    """

    core: ConnectionCore
    link: Link
    lanes: LaneSet
    services: Services

    def run(self) -> None:
        """Do everything that the core requests now."""

    def check_ended(self) -> None:
        """Check whether the connection can end, because a path has become quiet."""

    def lane_broke(self, endpoint: LaneEndpoint) -> None:
        """Handle a broken lane, which gets a replacement."""
