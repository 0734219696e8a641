"""The one way of tests into objects that users hold.

A test uses public names. Where it must look behind them, or change what is there, it
goes through here, so that only this file knows how the objects are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import kvwire
import kvwire_store
from kvwire.backend import Link, WindowReader
from kvwire.driver.buffers import BufferTable
from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.driver.device_staging import DeviceStaging
from kvwire.driver.lanes.state import LaneSet
from kvwire.endpoint.acceptor import Acceptor
from kvwire.endpoint.communicator import services_of
from kvwire.endpoint.links import Driver, Links
from kvwire.kv.plan import Segment
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.records import RequestRecord
from kvwire.transfers.leg import Leg
from kvwire.transfers.outgoing import SendFlow
from kvwire.transfers.registry import Question, TransferRegistry, TransferServices
from kvwire.transfers.state import OFF_LINK
from kvwire_store.server.served import ServedStore
from kvwire_store.tier_stack import TierStack

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


def members(of: kvwire.Communicator) -> dict[str, Any]:
    """The members of its directory that it knows now."""
    return dict(of._membership.members)


def candidates(of: kvwire.Peer) -> list[Any]:
    """The members that a peer would try now, in their order."""
    return list(of._candidates())


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
    return of._driver


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


def served_reads(of: kvwire.Connection) -> Collection[object]:
    """The gets from its windows that are being sent."""
    return of._shown.served


def shown(of: kvwire.Connection) -> Collection[object]:
    """Its windows that the peer has open."""
    return of._shown.by_number


def reader(of: kvwire.RemoteWindow) -> WindowReader | None:
    """What reads it in place."""
    return of._opened.reader


def record(of: kvwire.Request[Any]) -> RequestRecord | None:
    """The core's record of a request, while it is posted."""
    return of._record


# --- a transfer -----------------------------------------------------------------------


def legs(of: kvwire.Outgoing | kvwire.Incoming) -> list[Leg]:
    """Its parts with its peers."""
    return of._legs


def leg(of: kvwire.Incoming) -> Leg | None:
    """Its part with its producer, if that was asked or has come."""
    return of._legs[0] if of._legs else None


def carrier(of: kvwire.Incoming) -> object:
    """What moves its segments on the link that carries it now, or did last."""
    return of._legs[0].flow if of._legs else None


def under_way(of: kvwire.Outgoing) -> int:
    """How many segments were sent to its consumer, and are not acknowledged."""
    flow = of._legs[0].flow
    return flow.under_way if isinstance(flow, SendFlow) else 0


def sent(of: kvwire.Outgoing) -> dict[int, Segment]:
    """Which, by number; it changes while they are sent and acknowledged."""
    flow = of._legs[0].flow
    return flow._sent if isinstance(flow, SendFlow) else {}


def planned(of: kvwire.Outgoing | kvwire.Incoming) -> bool:
    """Whether a peer has met it, over this link or an earlier one."""
    return any(leg.planned for leg in of._legs)


def key(of: kvwire.Incoming | kvwire.Outgoing) -> bytes:
    """Its name on the wire."""
    return of._key


def half(of: kvwire.Incoming) -> bytes:
    """Its half, as it goes on with a producer that it has met."""
    return of._offer(of._legs[0].peer_id).encode()


def questions(of: kvwire.Communicator) -> list[Question]:
    """What peers ask for and wait for, by name."""
    slots = registry(of)._slots.values()
    return [question for slot in slots for question in slot.asked.values()]


def remembered(of: kvwire.Communicator) -> list[bytes]:
    """The names whose last use some peer does not know the end of."""
    return [key[0] for key, asker in registry(of)._past if not asker]


def owed(of: kvwire.Communicator) -> list[Leg]:
    """What is over here and may not be known to the peer, without a link."""
    return [leg for leg in registry(of)._owed if leg.state in OFF_LINK]


def tiers(of: kvwire_store.BlockStore) -> TierStack:
    """The tiers of a store: its memory, and those below."""
    return of._tiers


def served(of: kvwire_store.StoreServer) -> ServedStore:
    """What a server shows of its store, and counts."""
    return of._served


def now() -> float:
    """The time on the clock of the loop, in seconds."""
    return asyncio.get_running_loop().time()


def mapped(name: str) -> int:
    """How much memory of this name peers in this process have mapped, to read it.

    An earlier test may have left some, which the garbage collector has not seen yet.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"memfd:{name} " in line and " r--s " in line for line in lines)
