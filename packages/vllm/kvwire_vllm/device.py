"""The device of a worker's caches, and the order of vLLM's kernels and kvwire's copies.

On a GPU the two run on different streams. Neither the host nor the whole GPU ever waits
for one of them. Two events order them, both recorded when vLLM calls the connector, on
the stream on which vLLM's thread queues its kernels:

* after the kernels that write a layer: kvwire reads the layer once this event has
  fired;
* after the kernels that used blocks before they were given to a new request: kvwire
  writes to the blocks once this event has fired.

The other direction needs no event: the GPU has finished with landed and drained blocks,
so any kernel that is queued later may use them.
"""

from __future__ import annotations

from kvwire import Engine
from kvwire.memory.device.copy_engine import CopyEngine
from kvwire.memory.device.registry import device_ops
from kvwire.spi import copy_engine
from kvwire.types import Device


class CacheDevice:
    """The device of a worker's caches: a GPU, or host memory."""

    def __init__(self, engine: Engine, device: Device | None) -> None:
        self._device = device
        self._ops = None if device is None else device_ops(device)
        self._copy_engine: CopyEngine | None = None
        if device is not None:

            async def made() -> CopyEngine:
                return copy_engine(engine.communicator, device)

            # Called before vLLM captures graphs, during which no thread may allocate.
            self._copy_engine = engine.run(made())

    def __str__(self) -> str:
        return "host memory" if self._device is None else str(self._device)

    def recorded(self) -> object | None:
        """Return an event after this thread's queued work; None for host memory."""
        return None if self._ops is None else self._ops.record_current()

    @property
    def failed(self) -> str:
        """The reason if the GPU has failed for good; "" if it has not."""
        return "" if self._copy_engine is None else self._copy_engine.failed
