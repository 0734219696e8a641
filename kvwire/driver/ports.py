"""What the driver needs of whoever owns its connections. Internal."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvwire.backend import Backend
from kvwire.config import Config
from kvwire.driver.buffers import BufferTable
from kvwire.driver.counters import Counters
from kvwire.driver.devices import Devices


class DriverOwner(Protocol):
    """The communicator, as the driver of one connection sees it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop on which everything happens."""

    @property
    def buffers(self) -> BufferTable:
        """The memory that transports use."""

    @property
    def config(self) -> Config:
        """Its configuration."""

    @property
    def counters(self) -> Counters:
        """Its counters."""

    @property
    def devices(self) -> Devices:
        """The devices whose memory it moves."""

    def lane_backend(self, name: str) -> Backend:
        """Return the backend of this name.

        Raises:
            BackendUnavailable: It is not installed.
        """
