"""Open lanes in the place of those that have broken, while their connection lives.

A port that was down, a device that was reset or a limit of the system may cost a lane
and be no matter a minute later, and a connection may live for weeks. Only the client
asks for lanes, so this is its affair alone; data goes on over what is left meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvwire.aio import Upkeep
from kvwire.driver.limits import RERAISE_S, RERAISE_S_MAX
from kvwire.errors import BackendUnavailable, KVWireError


class LaneReconnector:
    """Opens the lanes of one connection again, one after the other, with pauses.

    Args:
        lacks: Whether lanes are missing that are worth another try.
        attempt: Opens one. Raises BackendUnavailable if it does not come up, and any
            other error of kvwire if the connection has ended.
        ended: Called whenever nothing is being opened any more.
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
        # A lane that breaks as soon as it is open is not opened without a pause.
        self._upkeep = Upkeep(RERAISE_S, RERAISE_S_MAX, steady_s=RERAISE_S_MAX)

    @property
    def busy(self) -> bool:
        """Tell whether it waits for the next try, or makes one."""
        return self._upkeep.running

    def lost(self) -> None:
        """Open a lane in the place of one that broke, in a task of its own."""
        if not self.busy and self._lacks():
            self._upkeep.lost("a lane has broken")
            self._upkeep.start(self._run).add_done_callback(lambda _: self._ended())

    def cancel(self) -> None:
        """Open nothing more: the connection ends."""
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
