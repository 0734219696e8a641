"""Copies pieces of a device's memory to other pieces, on its own stream.

The kernel gathers many pieces into one contiguous range, or scatters one range into
many pieces. So if both sides consist of many pieces, the bytes pass through a buffer on
the device, 16 MiB at a time. The stream works in order, so one buffer is enough.
"""

from __future__ import annotations

from typing import Final

from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.memory.device.copy_engine import CallSoon, Done, WatchedStream
from kvwire.memory.device.ops import DeviceOps

# Queueing a gather and a scatter takes the host some 50 us, in which a GPU moves more
# than this.
PASSING_BYTES: Final = 16 * MIB


class DeviceMoves:
    """Moves pieces within one device, or to it from memory that it can reach.

    Args:
        ops: The device.
        call_soon: Schedules a call on the loop, from any thread.
        passing_bytes: The size of the buffer.
    """

    def __init__(
        self, ops: DeviceOps, call_soon: CallSoon, passing_bytes: int = PASSING_BYTES
    ) -> None:
        self._way = WatchedStream(ops, call_soon, "within")
        try:
            self._passing: Fragments = self._way.stream.buffer(passing_bytes)
        except BaseException:
            self._way.close()
            raise

    def move(self, source: Fragments, into: Fragments, done: Done) -> None:
        """Queue a copy between pieces with the same total number of bytes.

        Keep both alive and unchanged until ``done`` is called on the loop.
        """
        stream = self._way.stream
        step = self._passing.nbytes
        for begin in range(0, source.nbytes, step):
            nbytes = min(step, source.nbytes - begin)
            origin = source.slice(begin, nbytes)
            target = into.slice(begin, nbytes)
            if len(target) == 1:
                stream.gather(origin, target)
                continue
            if len(origin) > 1:
                passing = self._passing.slice(0, nbytes)
                stream.gather(origin, passing)
                origin = passing
            stream.scatter(origin, target)
        self._way.watch(done)

    def close(self) -> None:
        """Release the stream once its work is done; never blocks."""
        self._way.close()
