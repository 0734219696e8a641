"""Reopens broken lanes while their connection lives.

A lane may break because a port was down, a device was reset or a system limit was
reached, and a minute later the cause may be gone, while a connection may live for
weeks. Only the client opens lanes, so only it reopens them; data uses the remaining
paths meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from kvwire.aio import Upkeep
from kvwire.errors import BackendUnavailable, KVWireError

# A broken lane is reopened after a pause, which doubles, with jitter. Recovery within a
# second is unlikely, and each attempt creates threads and registered memory on both
# sides. After an outage of a minute, another minute is acceptable.
RERAISE_S: Final = 1.0
RERAISE_S_MAX: Final = 60.0


class LaneReconnector:
    """Reopens the lanes of one connection, one after the other, with pauses.

    Args:
        lacks: Returns whether a lane is missing and worth another attempt.
        attempt: Opens one lane. Raises BackendUnavailable if the lane does not open,
            and any other error of kvwire if the connection has ended.
        ended: Called each time that the attempts stop.
    """

    def __init__(
        self,
        lacks: Callable[[], bool],
        attempt: Callable[[], Awaitable[None]],
        ended: Callable[[], None],
    ) -> None:
        self._lacks = lacks
        self._attempt = attempt
        self._ended = ended
        # A lane that breaks as soon as it is open is reopened only after a pause.
        self._upkeep = Upkeep(RERAISE_S, RERAISE_S_MAX, steady_s=RERAISE_S_MAX)

    @property
    def busy(self) -> bool:
        """Whether an attempt is running or scheduled."""
        return self._upkeep.running

    def lost(self) -> None:
        """Replace a broken lane, in a separate task."""
        if not self.busy and self._lacks():
            self._upkeep.lost("a lane has broken")
            self._upkeep.start(self._run).add_done_callback(lambda _: self._ended())

    def cancel(self) -> None:
        """Stop opening lanes, because the connection ends."""
        self._upkeep.cancel()

    async def _run(self) -> None:
        async for _ in self._upkeep:
            if not self._lacks():
                return
            try:
                await self._attempt()
            except BackendUnavailable as exc:
                self._upkeep.lost(str(exc))
            except KVWireError:
                return
            else:
                self._upkeep.back()
                if self._lacks():
                    self._upkeep.lost("more lanes have broken")
