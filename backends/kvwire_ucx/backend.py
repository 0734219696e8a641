"""The entry point: one UCX worker for a communicator's lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar, NoReturn

from kvwire.backend import (
    Availability,
    Backend,
    Capabilities,
    Finding,
    Link,
    Listener,
)
from kvwire.errors import BackendUnavailable
from kvwire.lane import Lane, LaneContext
from kvwire.types import Address
from kvwire_ucx import diagnosis
from kvwire_ucx.context import Context
from kvwire_ucx.lane import UcxLane
from kvwire_ucx.library import REMEDY, find, load
from kvwire_ucx.settings import parse
from kvwire_ucx.worker import Worker


class UcxBackend(Backend):
    """Data over UCX, beside the control link of another transport.

    Workers are made with the first lane, one for each set of settings: in practice one,
    since a communicator has one configuration.
    """

    scheme: ClassVar[str] = "ucx"
    capabilities: ClassVar[Capabilities] = Capabilities(links=False, lanes=True)

    def __init__(self) -> None:
        self._workers: dict[frozenset[tuple[str, str]], Worker] = {}
        self._lanes: set[Lane] = set()

    @classmethod
    def rank(cls) -> int:
        """Before TCP where a network card would move the bytes, else behind it."""
        return diagnosis.rank()

    @classmethod
    def availability(cls) -> Availability:
        """See :class:`~kvwire.backend.Backend`; loads the library."""
        try:
            if find() is None:
                return Availability(
                    available=False, reason="no libucp was found", remedy=REMEDY
                )
            library = load()
        except BackendUnavailable as exc:
            return Availability(available=False, reason=str(exc), remedy=REMEDY)
        reason = f"UCX {library.version} ({library.path}): {diagnosis.transports()}"
        return Availability(available=True, reason=reason)

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        """See :class:`~kvwire.backend.Backend`."""
        return diagnosis.findings()

    async def listen(
        self, address: Address, accept: Callable[[Link], None]
    ) -> Listener:
        """UCX has no addresses of its own.

        Raises:
            BackendUnavailable: Always.

        Cancel safety: safe.
        """
        _no_links(address)

    async def connect(self, address: Address) -> Link:
        """UCX has no addresses of its own.

        Raises:
            BackendUnavailable: Always.

        Cancel safety: safe.
        """
        _no_links(address)

    def open_lane(self, context: LaneContext) -> Lane:
        """See :class:`~kvwire.backend.Backend`.

        Raises:
            BackendUnavailable: There is no UCX, it does not take these settings, or has
                no RDMA and is required to.
        """
        lane = UcxLane(self._worker(context.settings), context, self._lanes.discard)
        self._lanes.add(lane)
        return lane

    async def aclose(self) -> None:
        """See :class:`~kvwire.backend.Backend`; what UCX still had ends with it.

        Cancel safety: safe.
        """
        for lane in list(self._lanes):
            lane.abort()
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.close()

    def _worker(self, settings: Mapping[str, str]) -> Worker:
        key = frozenset(settings.items())
        worker = self._workers.get(key)
        if worker is None:
            context = Context(parse(settings))
            try:
                worker = Worker(context, asyncio.get_running_loop())
            except BaseException:
                context.close()
                raise
            self._workers[key] = worker
        return worker


def _no_links(address: Address) -> NoReturn:
    raise BackendUnavailable(
        f"{address}: ucx carries data beside a control link and has no addresses of "
        f'its own; listen on and connect to tcp://..., with transport="ucx"'
    )
