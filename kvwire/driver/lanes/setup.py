"""Brings the lanes of a connection up, one transport after the other.

The client goes through the transports that the server has found possible, in that
order, until one has come up on both sides. The server answers. Both keep why each one
failed, so that both can say it: see :mod:`kvwire.driver.lanes.active_transport`. A lane
that breaks later is raised again by the client: see
:mod:`kvwire.driver.lanes.reconnect`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvwire.backend import Backend
from kvwire.backend.lane import LaneContext
from kvwire.driver.counters import Counters
from kvwire.driver.lanes.active_transport import ActiveTransport
from kvwire.driver.lanes.reconnect import LaneReconnector
from kvwire.driver.lanes.scheduler import LaneEndpoint, LaneScheduler
from kvwire.errors import BackendUnavailable, KVWireError
from kvwire.limits import LANE_TIMEOUT_S
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.events import LaneAsked, LaneBootstrapped, LaneClosed, LaneOpened
from kvwire.proto.state import CloseState
from kvwire.types import Address, TransportReport

logger = logging.getLogger("kvwire")

# A peer that has refused a lane so often in a row, for two minutes or so, will not have
# it: its device is gone for good, or its system's limits are reached.
REFUSALS_MAX: Final = 8

OpenBackend = Callable[[str], Backend]
Settings = Mapping[str, Mapping[str, str]]
LaneEvent = LaneAsked | LaneBootstrapped | LaneOpened | LaneClosed


@dataclass(frozen=True, slots=True)
class Route:
    """Where a connection goes, and what was agreed about it.

    Attributes:
        scheme: The transport of the control link.
        remote: Where that leads.
        report: The server's verdicts, in the order in which they are tried.
    """

    scheme: str
    remote: Address | None
    report: TransportReport


class LaneSetup:
    """The raising of one connection's lanes, on either side.

    Attributes:
        carrier: What carries the data as a result.
    """

    def __init__(
        self,
        core: ConnectionCore,
        lanes: LaneScheduler,
        route: Route,
        *,
        open_backend: OpenBackend,
        settings: Settings,
        counters: Counters,
        run: Callable[[], None],
    ) -> None:
        """Prepare it.

        Args:
            core: The protocol of the connection.
            lanes: Where halves go.
            route: Where the connection goes.
            open_backend: Gives a backend by its name, or raises BackendUnavailable.
            settings: Of each backend.
            counters: Of the communicator.
            run: Carries out what the core says.
        """
        self.carrier = ActiveTransport(
            lanes,
            scheme=route.scheme,
            report=route.report,
            peer=core.agreement.peer,
            counters=counters,
        )
        self._core = core
        self._lanes = lanes
        self._possible = tuple(c.name for c in route.report if c.possible or c.taken)
        self._scheme = route.scheme
        self._remote = route.remote
        self._open_backend = open_backend
        self._settings = settings
        self._run = run
        # Lanes that the server is asked for, by number.
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._joining: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Client: the transport that was chosen, how many of its lanes came up, and how
        # often the server has refused one since.
        self._chosen = ""
        self._wanted = 0
        self._refusals = 0
        self._restoring = LaneReconnector(
            self._lacks, self._raise_again, lanes.check_ended
        )
        self._settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counters = counters
        lanes.on_broken = self._broken
        lanes.fallback = route.scheme in self._possible

    @property
    def due(self) -> bool:
        """Whether data is to go on lanes, which are not there yet."""
        return self.carrier.taken not in ("", self._scheme)

    @property
    def busy(self) -> bool:
        """Whether a half is being made, or may be."""
        return bool(self._tasks) or self._restoring.busy

    def event(self, event: LaneEvent) -> None:
        """Act on what the core says about lanes."""
        match event:
            case LaneAsked():
                self._asked(event)
            case LaneBootstrapped():
                self._answered(event)
            case LaneOpened():
                self._raised(event)
            case LaneClosed():
                self._lowered(event)

    # --- the client -------------------------------------------------------------------

    async def raise_lanes(self, count: int) -> None:
        """Bring up the first transport that can, with ``count`` data paths.

        Raises:
            BackendUnavailable: None of those that are allowed can; says why, for each.
            ConnectionClosed: The connection has ended.

        Cancel safety: the connection is to be aborted.
        """
        if not self.due and count == 1:
            return
        for name in self._possible:
            if name == self._scheme:
                self.carrier.take_link()
                self._wanted = await self._raise_more(name, count - 1)
                break
            try:
                half = await self._raise(name)
            except BackendUnavailable as exc:
                self.carrier.failed[name] = str(exc)
                logger.warning(
                    "peer %s: %s cannot carry the data: %s",
                    self._core.agreement.peer,
                    name,
                    exc,
                )
                continue
            self.carrier.take_lane(half)
            self._wanted = 1 + await self._raise_more(name, count - 1)
            break
        else:
            failed = self.carrier.failed.items()
            reasons = "; ".join(f"{name}: {why}" for name, why in failed)
            raise BackendUnavailable(f"no transport that is allowed works: {reasons}")
        self._chosen, self._refusals = name, 0
        self._core.lanes.settle()
        self._settle()
        self._run()
        self._restoring.lost()  # if one has broken while others were coming up

    async def _raise_more(self, name: str, count: int) -> int:
        """More lanes of a transport that is taken, which works without them; how many.

        What has not come up at first is not tried again: nobody has had it.
        """
        for raised in range(count):
            try:
                await self._raise(name)
            except BackendUnavailable as exc:
                logger.warning("only some lanes of %s came up: %s", name, exc)
                return raised
        return count

    def _lacks(self) -> bool:
        """Whether a lane that had been up is missing, and worth another try."""
        there = sum(half.backend == self._chosen for half in self._lanes.up)
        return (
            self._core.phase is CloseState.OPEN
            and self._refusals < REFUSALS_MAX
            and there < self._wanted
        )

    async def _raise_again(self) -> None:
        """Bring one back that has broken.

        Raises:
            BackendUnavailable: It does not come up.
            ConnectionClosed: The connection has ended.
        """
        try:
            half = await self._raise(self._chosen)
        except BackendUnavailable as exc:
            if self._refusals < REFUSALS_MAX:
                said = f"{self._chosen} does not come up again: {exc}"
                self.carrier.say(said, logging.INFO)
            else:
                self.carrier.say(f"{self._chosen} is not asked for any more: {exc}")
            raise
        self._refusals = 0
        self._came_back(half)

    async def _raise(self, name: str) -> LaneEndpoint:
        """Bring up one lane.

        Raises:
            BackendUnavailable: It cannot.
            ConnectionClosed: The connection has ended.
        """
        if self._core.error is not None:
            raise self._core.error
        number = self._core.lanes.next_number()
        if number is None:
            raise BackendUnavailable("too many lanes were tried")
        half = self._half(name, number)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        self._answers[number] = answer  # bounded: LANES_MAX
        self._core.lanes.ask(number, name, half.lane.bootstrap)
        self._lanes.add(half)
        self._run()
        self._joining = loop.create_task(self._join(half, answer))
        try:
            async with asyncio.timeout(LANE_TIMEOUT_S):
                await self._joining
        except BaseException as exc:
            given_up = self._given_up(half, exc)
            if given_up is exc:
                raise
            raise given_up from exc
        finally:
            self._joining = None
            del self._answers[number]
        if not self._lanes.knows(half):
            raise BackendUnavailable(half.lowered or "it broke as soon as it was up")
        self._core.lanes.up(number)
        self._counters.lanes_raised += 1
        self._lanes.raised(number)
        self._run()
        return half

    async def _join(self, half: LaneEndpoint, answer: asyncio.Future[bytes]) -> None:
        """In a task of its own, which the end of the connection cancels."""
        await self._join_lane(half, await answer)

    async def _join_lane(self, half: LaneEndpoint, bootstrap: bytes) -> None:
        await half.lane.join(bootstrap, self._lanes)
        half.joined = True

    def _answered(self, event: LaneBootstrapped) -> None:
        """The server's half is there."""
        answer = self._answers.get(event.lane)
        if answer is not None and not answer.done():
            answer.set_result(event.bootstrap)

    # --- the server -------------------------------------------------------------------

    def _asked(self, event: LaneAsked) -> None:
        """The client asks for a lane: join with it, in a task of its own."""
        task = asyncio.get_running_loop().create_task(self._answer(event))
        self._tasks.add(task)  # bounded: LANES_MAX
        task.add_done_callback(self._answer_given)

    def _raised(self, event: LaneOpened) -> None:
        """A lane is up on both sides; of lane 0: there will be no more."""
        if event.lane:
            self._counters.lanes_raised += 1
            half = self._lanes.raised(event.lane)
            if half is not None and self._settled.done():
                self._came_back(half)
            return
        up = self._lanes.up
        if up and up[0].backend != self._scheme:
            self.carrier.take_lane(up[0])
        else:
            self.carrier.take_link()
        self._settle()

    async def _answer(self, event: LaneAsked) -> None:
        name, number = event.backend, event.lane
        half: LaneEndpoint | None = None
        try:
            if name not in self._possible:
                raise BackendUnavailable(f"{name} was not agreed on")
            half = self._half(name, number)
            self._lanes.add(half)
            async with asyncio.timeout(LANE_TIMEOUT_S):
                await self._join_lane(half, event.bootstrap)
        except BaseException as exc:
            if half is None:
                reason = str(exc)
                self._core.lane_gone(number, reason)
                self._run()
            else:
                reason = str(self._given_up(half, exc))
            if name in self._possible:  # and not whatever the peer has made up
                self.carrier.failed[name] = reason
            if not isinstance(exc, Exception):
                raise
            return
        if self._lanes.knows(half):
            self._core.lanes.answer(number, half.lane.bootstrap)
            self._run()

    def _answer_given(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._lanes.check_ended()

    async def raised(self) -> None:
        """Server: wait until the client has raised its lanes, or has gone.

        Cancel safety: safe, it only watches.
        """
        if self.due:
            await asyncio.shield(self._settled)

    # --- both -------------------------------------------------------------------------

    def _lowered(self, event: LaneClosed) -> None:
        """The peer's half is gone, or never came."""
        answer = self._answers.get(event.lane)
        if answer is not None and not answer.done():
            self._refusals += 1
            answer.set_exception(BackendUnavailable(f"the peer: {event.reason}"))
        elif not self._settled.done():
            name = self._core.lanes.backend(event.lane)
            if name in self._possible:
                self.carrier.failed.setdefault(name, f"the peer: {event.reason}")
        self._lanes.lowered(event)

    def cancel(self) -> None:
        """The connection ends: nothing more comes up."""
        for task in self._tasks:
            task.cancel()
        if self._joining is not None:
            self._joining.cancel()
        self._restoring.cancel()
        self.carrier.end()
        self._settle()

    def _half(self, name: str, number: int) -> LaneEndpoint:
        backend = self._open_backend(name)
        context = LaneContext(
            role=self._core.agreement.role,
            number=number,
            secret=self._core.agreement.keys.lane_secret(number),
            remote_address=self._remote,
            settings=self._settings.get(name, {}),
        )
        try:
            return LaneEndpoint(number, name, backend.open_lane(context))
        except Exception as exc:
            if isinstance(exc, KVWireError):
                raise
            raise self._unavailable(name, exc) from exc

    def _given_up(self, half: LaneEndpoint, exc: BaseException) -> BaseException:
        """Undo a half that has not come up; what its raiser gets."""
        ended = self._core.error
        if ended is not None:
            # Whatever this lane says about it, it is not to blame.
            exc = exc if _is_cancelled() else ended
        else:
            self._counters.lanes_failed += 1
            if isinstance(exc, TimeoutError):
                exc = BackendUnavailable(f"it did not come up in {LANE_TIMEOUT_S:g} s")
            elif isinstance(exc, Exception) and not isinstance(exc, KVWireError):
                exc = self._unavailable(half.backend, exc)
        self._lanes.drop(half, str(exc) or "cancelled")
        return exc

    def _unavailable(self, name: str, exc: Exception) -> BackendUnavailable:
        """What a backend means that raises what the contract does not name."""
        if isinstance(exc, OSError):
            return BackendUnavailable(f"the system refuses: {exc}")
        logger.error("a bug of backend %s", name, exc_info=exc)
        return BackendUnavailable(f"a bug of the backend: {exc!r}")

    def _came_back(self, half: LaneEndpoint) -> None:
        self._counters.lanes_restored += 1
        self.carrier.lane_came_back(half)

    def _broken(self, name: str, reason: str) -> None:
        self._counters.lanes_failed += 1
        self.carrier.lane_broke(name, reason)
        self._restoring.lost()

    def _settle(self) -> None:
        if not self._settled.done():
            self._settled.set_result(None)


def _is_cancelled() -> bool:
    """Whether this task is to end, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
