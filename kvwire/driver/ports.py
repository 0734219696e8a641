"""What the driver needs from the owner of its connections. Internal."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvwire.backend import Backend
from kvwire.config import Config
from kvwire.driver.buffers import BufferTable
from kvwire.driver.codec_threads import CodecThreads
from kvwire.driver.counters import Counters
from kvwire.driver.devices import Devices


class DriverOwner(Protocol):
    """Stands for the communicator, as the driver of one connection sees it."""

    loop: asyncio.AbstractEventLoop
    config: Config
    buffers: BufferTable
    counters: Counters
    devices: Devices
    codec_threads: CodecThreads

    def lane_backend(self, name: str) -> Backend:
        """Return the backend of this name."""
