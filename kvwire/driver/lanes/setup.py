"""Opens a connection's lanes, one transport after the other.

The client tries the transports that the server has found possible, in the server's
order, until a lane is open on both sides. The server answers each attempt. Both record
why each transport failed: see :mod:`kvwire.driver.lanes.state`.

If a lane breaks later, the client reopens it, as long as the connection lives; data
uses the remaining paths meanwhile. A port may have been down, a device reset or a limit
of the system reached, and a minute later the cause may be gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvwire.aio import Upkeep, start_task
from kvwire.backend.lane import LaneContext, LaneHandler
from kvwire.driver.lanes.active_transport import ActiveTransport
from kvwire.driver.lanes.state import LaneEndpoint, LaneInput, LaneState
from kvwire.driver.ports import PathOwner
from kvwire.errors import BackendUnavailable, KVWireError, again
from kvwire.limits import (
    BOOTSTRAP_BYTES_MAX,
    LANE_TIMEOUT_SHARE,
    LANE_TIMEOUT_SHARE_LAST,
)
from kvwire.proto.events import LaneAsked, LaneBootstrapped, LaneClosed, LaneOpened
from kvwire.proto.state import CloseState

logger: logging.Logger = logging.getLogger("kvwire.lanes")

# A broken lane is reopened after a pause, which doubles, with jitter. Recovery within a
# second is unlikely, and each attempt creates threads and registered memory on both
# sides. After an outage of a minute, another minute is acceptable.
RERAISE_S: Final = 1.0
RERAISE_S_MAX: Final = 60.0
# If a peer has refused a lane this often in a row, for two minutes or so, it is asked
# rarely: its device has gone, or its system's limits are reached.
REFUSALS_MAX: Final = 8
REFUSED_PAUSE_S: Final = 600.0


class LaneSetup:
    """Opens the lanes of one connection, on either side.

    Args:
        owner: The connection's driver.
        active: The active transport, which logs changes.
        handler: Receives the lanes' calls.
    """

    def __init__(
        self, owner: PathOwner, active: ActiveTransport, handler: LaneHandler
    ) -> None:
        self._owner = owner
        self._core = owner.core
        self._lanes = owner.lanes
        self._active = active
        self._handler = handler
        self._services = owner.services
        self._patience_s = owner.services.config.handshake_timeout_s
        # Server: tasks that open the lanes that the client has requested, how many it
        # has requested, and the limits of those for which its endpoint is not ready.
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked = 0
        self._unready: dict[int, asyncio.TimerHandle] = {}
        # Client: the peer's bootstrap for the lane that is being opened, the task that
        # joins this lane, the first transport that worked, how many of its lanes
        # opened, and how often the server has since refused one.
        self._bootstrap: tuple[int, asyncio.Future[bytes]] | None = None
        self._joining: asyncio.Task[None] | None = None
        self._chosen = ""
        self._wanted = 0
        self._refusals = 0
        # Asks a peer again that has refused often.
        self._asking_again: asyncio.TimerHandle | None = None
        # Reopens lanes, one after the other; made when the first one breaks.
        self._reopening: Upkeep | None = None
        # Called with each lane that opens.
        self.on_open: Callable[[LaneEndpoint], None] | None = None
        self._initial_set: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def busy(self) -> bool:
        """Whether an endpoint is being created or may still be created."""
        reopening = self._reopening
        return bool(self._tasks) or (reopening is not None and reopening.running)

    @property
    def _needed(self) -> bool:
        """Whether the preferred transport needs a lane."""
        return self._lanes.verdicts.taken not in ("", self._lanes.scheme)

    # --- the client -------------------------------------------------------------------

    async def open_lanes(self, count: int, patience_s: float) -> None:
        """Open lanes of the first transport that works, for ``count`` data paths.

        Args:
            count: The number of data paths.
            patience_s: The time that is left until the connection must be usable. Each
                transport has a share of it, or of ``handshake_timeout_s`` if that is
                less, so that time for the next transport is always left.

        Cancel safety: the caller has to abort the connection.
        """
        end = self._services.loop.time() + patience_s
        lanes = self._lanes
        if not self._needed and count == 1:
            return
        for name in lanes.possible:
            first = 0 if name == lanes.scheme else 1
            is_last = name == lanes.possible[-1]
            share = LANE_TIMEOUT_SHARE_LAST if is_last else LANE_TIMEOUT_SHARE
            try:
                if first:
                    await self._open(name, self._limit_s(share, end))
            except BackendUnavailable as exc:
                lanes.failed[name] = str(exc)
                peer = self._core.agreement.peer
                logger.warning("peer %s: %s cannot carry the data: %s", peer, name, exc)
                continue
            self._wanted = first + await self._open_more(name, count - 1, end)
            self._chosen = name
            self._refusals = 0
            break
        else:
            reasons = "; ".join(f"{name}: {why}" for name, why in lanes.failed.items())
            raise BackendUnavailable(f"no allowed transport works: {reasons}")
        self._core.lanes.end_initial_set()
        self._end_initial_set()
        self._owner.run()
        self.reopen_lost()  # if one has broken while others were being opened

    def _limit_s(self, share: float, end: float) -> float:
        """Return the time for one lane, if all have to be open at ``end``."""
        left_s = max(end - self._services.loop.time(), 0.0)
        return share * min(left_s, self._patience_s)

    async def _open_more(self, name: str, count: int, end: float) -> int:
        """Open more lanes of a transport that works already; return how many opened.

        A lane that did not open at first is not retried, since no data relied on it.
        """
        for opened in range(count):
            try:
                await self._open(name, self._limit_s(LANE_TIMEOUT_SHARE, end))
            except BackendUnavailable as exc:
                logger.warning("only some lanes of %s could be opened: %s", name, exc)
                return opened
        return count

    def _lacks(self) -> bool:
        """Return whether an opened lane has been lost and is worth another attempt."""
        return (
            self._core.phase is CloseState.OPEN
            and self._refusals < REFUSALS_MAX
            and len(self._lanes.open) < self._wanted
        )

    async def _reopen(self) -> None:
        """Open a lane in place of a broken one."""
        name = self._chosen
        try:
            endpoint = await self._open(name, LANE_TIMEOUT_SHARE * self._patience_s)
        except BackendUnavailable as exc:
            if self._refusals < REFUSALS_MAX:
                self._active.log(f"{name} cannot be reopened: {exc}", logging.INFO)
            else:
                pause_s = REFUSED_PAUSE_S
                self._active.log(f"{name} is not requested for {pause_s:g} s: {exc}")
                loop = asyncio.get_running_loop()
                self._asking_again = loop.call_later(pause_s, self._ask_again)
            raise
        self._refusals = 0
        self._active.lane_came_back(endpoint)

    def _ask_again(self) -> None:
        """Ask a peer once more that has refused often."""
        self._refusals = REFUSALS_MAX - 1
        self.reopen_lost()

    async def _open(self, name: str, timeout_s: float) -> LaneEndpoint:
        """Open one lane."""
        self._check_alive()
        number = self._core.lanes.next_number()
        if number is None:
            raise BackendUnavailable("too many lanes were opened on this connection")
        endpoint = self._make(name, number)
        try:
            ours = _bootstrap_of(endpoint)
        except BackendUnavailable:
            endpoint.lane.abort()
            raise
        loop = asyncio.get_running_loop()
        bootstrap: asyncio.Future[bytes] = loop.create_future()
        self._bootstrap = number, bootstrap
        self._core.lanes.open(number, name, ours)
        self._lanes.add(endpoint)
        self._owner.run()
        # In a separate task, which the end of the connection cancels.
        self._joining = start_task(self._join(endpoint, bootstrap))
        try:
            async with asyncio.timeout(timeout_s):
                await self._joining
        except BaseException as exc:
            given_up = self._give_up(endpoint, exc, timeout_s)
            if given_up is exc:
                raise
            raise given_up from exc
        finally:
            self._joining = self._bootstrap = None
        if endpoint.state is not LaneState.JOINED:
            self._check_alive()
            raise BackendUnavailable(
                endpoint.reason or "it broke as soon as it was open"
            )
        self._core.lanes.ready(number)
        self._ready(endpoint)
        self._owner.run()
        return endpoint

    async def _join(
        self, endpoint: LaneEndpoint, bootstrap: asyncio.Future[bytes]
    ) -> None:
        await endpoint.lane.join(await bootstrap, self._handler)
        self._lanes.advance(endpoint, LaneInput.JOINED)
        _description(endpoint)

    def bootstrapped(self, event: LaneBootstrapped) -> None:
        """Join the server's endpoint, whose bootstrap has arrived."""
        bootstrap = self._awaited(event.lane)
        if bootstrap is not None:
            bootstrap.set_result(event.bootstrap)

    def _awaited(self, number: int) -> asyncio.Future[bytes] | None:
        """Return the future for a lane's bootstrap, if it is still awaited."""
        if self._bootstrap is None or self._bootstrap[0] != number:
            return None
        bootstrap = self._bootstrap[1]
        return None if bootstrap.done() else bootstrap

    # --- the server -------------------------------------------------------------------

    def asked(self, event: LaneAsked) -> None:
        """Join the client's endpoint, in a separate task."""
        self._asked += 1
        task = start_task(self._answer(event))
        self._tasks.add(task)  # bounded: LANES_MAX
        task.add_done_callback(self._answered)

    def opened(self, event: LaneOpened) -> None:
        """Use a lane that both sides have ready; number 0 ends the first choice."""
        if not event.lane:
            self._end_initial_set()
            return
        self._forget_limit(event.lane)
        endpoint = self._lanes.find(event.lane)
        if endpoint is None:
            self._services.counters.lanes_raised += 1
            return
        self._ready(endpoint)
        if endpoint.state is LaneState.OPEN and self._initial_set.done():
            self._active.lane_came_back(endpoint)

    async def _answer(self, event: LaneAsked) -> None:
        name = event.backend
        number = event.lane
        endpoint: LaneEndpoint | None = None
        timeout_s = LANE_TIMEOUT_SHARE_LAST * self._patience_s
        try:
            if name not in self._lanes.possible:
                raise BackendUnavailable(f"{name} was not agreed on")
            endpoint = self._make(name, number)
            self._lanes.add(endpoint)
            async with asyncio.timeout(timeout_s):
                await endpoint.lane.join(event.bootstrap, self._handler)
                self._lanes.advance(endpoint, LaneInput.JOINED)
                _description(endpoint)
                bootstrap = _bootstrap_of(endpoint)
        except BaseException as exc:
            if endpoint is None:
                reason = str(exc)
                self._core.lane_gone(number, reason)
                self._owner.run()
            else:
                reason = str(self._give_up(endpoint, exc, timeout_s))
            if name in self._lanes.possible:  # the peer may have sent any name
                self._lanes.failed[name] = reason
            if not isinstance(exc, Exception):
                raise
            return
        if endpoint.state is LaneState.JOINED:
            self._core.lanes.answer(number, bootstrap)
            late = self._services.loop.call_later(
                timeout_s, self._end_unready, endpoint, timeout_s
            )
            self._unready[number] = late  # bounded: LANES_MAX
            self._owner.run()

    def _end_unready(self, endpoint: LaneEndpoint, timeout_s: float) -> None:
        """End a lane for which the client's endpoint is not ready in time.

        The client may have more patience, and then uses its next transport now.
        """
        self._forget_limit(endpoint.number)
        if endpoint.state is LaneState.JOINED:
            given_up = self._give_up(endpoint, TimeoutError(), timeout_s)
            self._lanes.failed[endpoint.backend] = str(given_up)

    def _forget_limit(self, number: int) -> None:
        late = self._unready.pop(number, None)
        if late is not None:
            late.cancel()

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._owner.check_ended()

    async def wait_initial_set(self) -> None:
        """On the server, wait until the client has opened its lanes or has gone.

        Raises:
            TimeoutError: The client has no lane that opens, and has not requested one
                for ``handshake_timeout_s``.

        Cancel safety: safe, it only watches.
        """
        while self._needed and not self._initial_set.done():
            asked = self._asked
            await asyncio.wait([self._initial_set], timeout=self._patience_s)
            opening = self._tasks or self._unready or self._asked > asked
            if not opening and not self._initial_set.done():
                raise TimeoutError

    # --- both -------------------------------------------------------------------------

    def peer_closed(self, event: LaneClosed) -> None:
        """Record why the peer's endpoint has ended, or was never made."""
        lanes = self._lanes
        reason = f"the peer: {event.reason}"
        bootstrap = self._awaited(event.lane)
        if bootstrap is not None:
            self._refusals += 1
            bootstrap.set_exception(BackendUnavailable(reason))
        elif self._bootstrap is not None and self._bootstrap[0] == event.lane:
            if self._joining is not None:
                self._joining.cancel()
        elif not self._initial_set.done():
            name = self._core.lanes.backend(event.lane)
            if name in lanes.possible:
                lanes.failed.setdefault(name, reason)

    def reopen_lost(self) -> None:
        """Replace the broken lanes."""
        if not self._lacks():
            return
        if self._reopening is None:
            # One that breaks as soon as it is open is reopened only after a pause.
            self._reopening = Upkeep(RERAISE_S, RERAISE_S_MAX, steady_s=RERAISE_S_MAX)
        if not self._reopening.running:
            self._reopening.lost("a lane has broken")
            over = self._reopening.start(self._reopen_all)
            over.add_done_callback(lambda _: self._owner.check_ended())

    async def _reopen_all(self) -> None:
        assert self._reopening is not None
        async for _ in self._reopening:
            if not self._lacks():
                return
            try:
                await self._reopen()
            except BackendUnavailable as exc:
                self._reopening.lost(str(exc))
            except KVWireError:
                return  # the connection has ended
            else:
                self._reopening.back()
                if self._lacks():
                    self._reopening.lost("more lanes have broken")

    def cancel(self) -> None:
        """Stop opening lanes, because the connection ends."""
        for task in self._tasks:
            task.cancel()
        if self._joining is not None:
            self._joining.cancel()
        if self._reopening is not None:
            self._reopening.cancel()
        if self._asking_again is not None:
            self._asking_again.cancel()
        for number in list(self._unready):
            self._forget_limit(number)
        self._active.end()
        if not self._initial_set.done():
            self._initial_set.set_result(None)

    def _end_initial_set(self) -> None:
        """Let data use the lanes that are open now."""
        self._lanes.end_initial_set()
        self._active.initial_set_done()
        if not self._initial_set.done():
            self._initial_set.set_result(None)

    def _ready(self, endpoint: LaneEndpoint) -> None:
        self._services.counters.lanes_raised += 1
        self._lanes.advance(endpoint, LaneInput.READY)
        peer = self._core.agreement.peer
        logger.debug(
            "peer %s: lane %d is open: %s", peer, endpoint.number, endpoint.backend
        )
        if endpoint.state is LaneState.OPEN and self.on_open is not None:
            self.on_open(endpoint)

    def _check_alive(self) -> None:
        """Raise the error of the connection if it has ended."""
        if self._core.error is not None:
            raise again(self._core.error)

    def _make(self, name: str, number: int) -> LaneEndpoint:
        """Make this side's endpoint of a lane."""
        backend = self._services.backend(name)
        context = LaneContext(
            role=self._core.agreement.role,
            number=number,
            secret=self._core.agreement.keys.lane_secret(number),
            remote_address=self._core.agreement.peer.address,
            settings=self._services.config.backends.get(name, {}),
            windows=self._services.config.one_sided_windows,
        )
        try:
            return LaneEndpoint(number, name, backend.open_lane(context))
        except Exception as exc:
            if isinstance(exc, KVWireError):
                raise
            raise _unavailable(name, exc) from exc

    def _give_up(
        self, endpoint: LaneEndpoint, exc: BaseException, timeout_s: float
    ) -> BaseException:
        """Close an unused endpoint; return the error for the call that opens it.

        If it joined at the last moment, it may touch memory until ``lane_closed``.
        """
        ended = self._core.error
        if ended is not None:
            # The connection's end is the cause, whatever reason this lane has.
            exc = exc if _is_cancelled() else ended
        else:
            self._services.counters.lanes_failed += 1
            if isinstance(exc, asyncio.CancelledError) and not _is_cancelled():
                why = endpoint.reason or "it ended"
                exc = BackendUnavailable(f"the peer: {why}")
            elif isinstance(exc, TimeoutError):
                exc = _too_slow(endpoint, timeout_s)
            elif isinstance(exc, Exception) and not isinstance(exc, KVWireError):
                exc = _unavailable(endpoint.backend, exc)
        reason = str(exc) or "cancelled"
        endpoint.lane.abort()
        left = self._lanes.advance(endpoint, LaneInput.GIVE_UP, reason)
        if left in (LaneState.JOINING, LaneState.ABANDONED):
            self._core.lane_gone(endpoint.number, reason)
            self._owner.run()
            self._owner.check_ended()
        return exc


def _bootstrap_of(endpoint: LaneEndpoint) -> bytes:
    """Return an endpoint's bootstrap, after checking that a frame can carry it.

    Raises:
        BackendUnavailable: The backend breaks its contract; another transport is tried
            then.
    """
    try:
        bootstrap: object = endpoint.lane.bootstrap
    except Exception as exc:
        raise _unavailable(endpoint.backend, exc) from exc
    if not isinstance(bootstrap, bytes):
        found = f"a {type(bootstrap).__name__}"
    elif len(bootstrap) > BOOTSTRAP_BYTES_MAX:
        found = f"of {len(bootstrap)} bytes"
    else:
        return bootstrap
    raise BackendUnavailable(f"a bug of the backend: its bootstrap is {found}")


def _description(endpoint: LaneEndpoint) -> str:
    """Return a lane's description; refuse a lane for which it is not a string."""
    try:
        description: object = endpoint.lane.description
    except Exception as exc:
        raise _unavailable(endpoint.backend, exc) from exc
    if not isinstance(description, str):
        raise BackendUnavailable(
            f"a bug of the backend: its description is {description!r}"
        )
    return description


def _too_slow(endpoint: LaneEndpoint, timeout_s: float) -> BackendUnavailable:
    """Return the error of a lane that has not opened in time."""
    try:
        description = _description(endpoint)
    except BackendUnavailable as exc:
        return exc
    limit = f"{round(timeout_s, 2):g} s"
    return BackendUnavailable(f"it did not open within {limit} ({description})")


def _unavailable(name: str, exc: Exception) -> BackendUnavailable:
    """Convert an exception that the contract forbids a backend to raise."""
    if isinstance(exc, OSError):
        return BackendUnavailable(f"the system refuses: {exc}")
    logger.error("bug in backend %s", name, exc_info=exc)
    return BackendUnavailable(f"a bug of the backend: {exc!r}")


def _is_cancelled() -> bool:
    """Return whether this task was cancelled, rather than only the future it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
