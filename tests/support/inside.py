"""The one way of tests into objects that users hold.

A test uses public names. Where it must look behind them, or change what is there, it
goes through here, so that only this file knows how the objects are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, overload

import kvwire
from kvwire.backend import Link
from kvwire.driver.buffers import BufferTable
from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.driver.device_staging import DeviceStaging
from kvwire.driver.lanes.state import LaneSet
from kvwire.endpoint.acceptor import Acceptor
from kvwire.endpoint.communicator import services_of
from kvwire.endpoint.connection import driver_of
from kvwire.endpoint.links import Driver, Links
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.records import RequestRecord
from kvwire.store.server.served import ServedStore
from kvwire.store.tier_stack import TierStack
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.matching import TransferRegistry
from kvwire.transfers.outgoing import OutgoingState
from kvwire.transfers.ports import TransferServices
from kvwire.transfers.receiver import ReceiveAttempt
from kvwire.transfers.sender import SendAttempt

# --- a communicator -------------------------------------------------------------------


def services(of: kvwire.Communicator) -> TransferServices:
    """What its parts share."""
    return services_of(of)


def links(of: kvwire.Communicator) -> Links:
    """Its links, and what makes them."""
    return of._links


def buffers(of: kvwire.Communicator) -> BufferTable:
    """The memory that its users have lent it."""
    return services(of).buffers


def drivers(of: kvwire.Communicator) -> dict[Driver, None]:
    """Those of its links, also in a handshake."""
    return of._links.drivers


def reception(of: kvwire.Communicator) -> Acceptor:
    """Its connections from others that are not accepted yet."""
    return of._acceptor


def opening(of: kvwire.Communicator) -> Collection[Any]:
    """Handshakes with others that are under way."""
    return of._acceptor._pending


def accepting(of: kvwire.Communicator) -> Collection[asyncio.Task[None]]:
    """What takes the links of others in."""
    return of._acceptor._tasks


def registry(of: kvwire.Communicator) -> TransferRegistry:
    """Its transfers, and questions for some."""
    return services(of).registry


# --- a connection ---------------------------------------------------------------------


def core(of: kvwire.Connection) -> ConnectionCore:
    """What decides."""
    return of._core


def driver(of: kvwire.Connection) -> ConnectionDriver:
    """What moves bytes for the core."""
    return driver_of(of)


def lanes(of: kvwire.Connection) -> LaneSet:
    """Its lanes."""
    return driver(of).lanes


def link(of: kvwire.Connection) -> Link:
    """Its control link."""
    return driver(of).link


def run(of: kvwire.Connection) -> None:
    """Act on what the core has to do now."""
    driver(of).run()


def staging(of: kvwire.Connection) -> DeviceStaging:
    """Its copies between devices and staging memory."""
    return driver(of).staging


def record(of: kvwire.Request[Any]) -> RequestRecord | None:
    """The core's record of a request, while it is posted."""
    return of._record


# --- a transfer -----------------------------------------------------------------------


@overload
def state(of: kvwire.Outgoing) -> OutgoingState: ...
@overload
def state(of: kvwire.Incoming) -> IncomingState: ...
def state(of: Any) -> Any:
    """What is behind an object that users hold."""
    return of._state


def attempt(of: kvwire.Incoming) -> ReceiveAttempt | None:
    """Its way over one connection, if there is one."""
    return of._state.attempt


def attempts(of: kvwire.Outgoing) -> list[SendAttempt]:
    """Its ways to its consumers."""
    return of._state.attempts


def planned(of: kvwire.Incoming) -> bool:
    """Whether a producer has met it, over this link or an earlier one."""
    return of._state.planned


def tiers(of: kvwire.BlockStore) -> TierStack:
    """The tiers of a store: its memory, and those below."""
    return of._tiers


def served(of: kvwire.StoreServer) -> ServedStore:
    """What a server shows of its store, and counts."""
    return of._served


def now() -> float:
    """The time on the clock of the loop, in seconds."""
    return asyncio.get_running_loop().time()
