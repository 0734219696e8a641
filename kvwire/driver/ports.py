"""The part of a connection's driver that the payload paths use."""

from __future__ import annotations

from typing import Protocol

from kvwire.backend import Link
from kvwire.driver.lanes.state import LaneEndpoint, LaneSet
from kvwire.driver.services import Services
from kvwire.proto.connection import ConnectionCore


class PathOwner(Protocol):
    """The interface of :class:`ConnectionDriver`, which owns staging and lanes.

    Attributes:
        core: Decides which frames are sent, and interprets the received ones.
        link: The control link.
        lanes: The state of each lane.
        services: The services that the communicator's parts share.
    """

    core: ConnectionCore
    link: Link
    lanes: LaneSet
    services: Services

    def run(self) -> None:
        """Do everything that the core requests now."""

    def check_ended(self) -> None:
        """Check whether the connection can end, because a path has become idle."""

    def lane_broke(self, endpoint: LaneEndpoint) -> None:
        """Handle a broken lane, which gets a replacement."""
