"""The open objects of a communicator, with their reasons for waiting, as plain values.

A snapshot, for operators and dumps, is taken within one turn of the loop, and nothing
is kept between two snapshots. ``msgspec.json.encode`` and ``dataclasses.asdict`` accept
it.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from kvwire.endpoint.connection import Connection
from kvwire.endpoint.links import Links
from kvwire.errors import printable
from kvwire.limits import NAME_CHARS_MAX, SNAPSHOT_ROWS_MAX
from kvwire.types import text_of

if TYPE_CHECKING:
    from kvwire.transfers.transfer import TransferView

P = TypeVar("P")

# Longer silences are shown: a link with nothing to send is silent for less.
SILENCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSnapshot:
    """Shows one end of a KV transfer that has no outcome yet.

    Attributes:
        id: Its id as text.
        side: Whether this side sends or receives.
        peers: The names of the current peers.
        age_s: Seconds since the call.
        layers: The number of its layers, over all groups; 0 until its peer is known.
        layers_marked: The layers that its producer has marked, as far as this side
            knows.
        layers_landed: Layers whose blocks have all landed.
        nbytes: Payload bytes to move; 0 until its peer is known.
        landed_bytes: Bytes that have landed; with several consumers, the smallest
            number.
        waits_for: The reason for waiting, in words.
        waits_on: Who has to act next: ``"peer"``, ``"program"`` (on this side) or
            ``"device"`` (on this side).
    """

    id: str
    side: Literal["outgoing", "incoming"]
    peers: tuple[str, ...]
    age_s: float
    layers: int
    layers_marked: int
    layers_landed: int
    nbytes: int
    landed_bytes: int
    waits_for: str
    # Snapshots of older releases lack it.
    waits_on: Literal["peer", "program", "device"] = "peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSnapshot:
    """Shows one connection.

    Attributes:
        peer: The peer's name.
        address: The peer's address; "" if the transport does not know it.
        transport: The transport that carries its data at the moment.
        state: The connection's state, such as ``"open"``.
        age_s: Seconds since its handshake.
        silent_s: Seconds since the peer last sent anything.
        queued_bytes: Bytes that its link has accepted but not sent yet.
        requests: The number of its open requests: messages, puts, gets, transfers.
        unreceived: The number of messages waiting to be received, including announced
            ones.
    """

    peer: str
    address: str
    transport: str
    state: str
    age_s: float
    silent_s: float
    queued_bytes: int
    requests: int
    unreceived: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSnapshot:
    """Shows one running call of a part.

    Attributes:
        text: The call, such as ``"get of 12 blocks"``.
        age_s: Seconds since the call.
    """

    text: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSnapshot:
    """Shows something that stands on kvwire on the same event loop, such as a store.

    Attributes:
        kind: Its kind in one word, such as ``"store"``.
        name: Its name.
        calls: Its running calls, oldest first.
        summary: Its most important numbers, in words.
        counters: Its counters, by their names.
        trouble: The last failure of each of its members; empty if there is none.
    """

    kind: str
    name: str
    calls: tuple[CallSnapshot, ...] = ()
    summary: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Shows the open objects of a communicator, and the other parts of its loop.

    Attributes:
        name: The name of the communicator.
        pid: The id of its process.
        incarnation: The random bytes that identify this start of it, in hexadecimal.
        at_s: The time of the snapshot, in seconds since 1970.
        connections: Its connections; ``SNAPSHOT_ROWS_MAX`` at most.
        transfers: Its open transfers, oldest first; ``SNAPSHOT_ROWS_MAX`` at most.
        open_connections: The number of connections.
        open_transfers: The number of open transfers.
        asked: Transfer ids that peers requested but this side has not offered.
        parts: What stands on kvwire on the same event loop, such as stores.
        quarantined_bytes: Bytes that a transport may still touch although their
            requests have ended.
        counters: The counters of the communicator, by their names.
    """

    name: str
    pid: int
    incarnation: str
    at_s: float
    connections: tuple[ConnectionSnapshot, ...]
    transfers: tuple[TransferSnapshot, ...]
    open_connections: int
    open_transfers: int
    asked: tuple[str, ...]
    parts: tuple[PartSnapshot, ...]
    quarantined_bytes: int
    counters: dict[str, int]


_Parts = weakref.WeakKeyDictionary[Any, Callable[[Any], PartSnapshot]]
# Each loop has its own, so no thread reads one while another one changes it.
_parts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Parts]
_parts = weakref.WeakKeyDictionary()


def show_part(part: P, look: Callable[[P], PartSnapshot]) -> None:
    """Include an object in the snapshots of the running loop's communicators.

    Args:
        part: The object; it is shown until it is collected.
        look: Returns its snapshot; called on its loop.
    """
    loop = asyncio.get_running_loop()
    _parts.setdefault(loop, weakref.WeakKeyDictionary())[part] = look


def snapshot_of(links: Links) -> Snapshot:
    """Take a snapshot of a communicator, on its loop."""
    services = links.services
    connections = list(links.connections)
    registry = services.registry
    asked = registry.unanswered[:SNAPSHOT_ROWS_MAX]
    return Snapshot(
        name=services.config.name,
        pid=os.getpid(),
        incarnation=links.identity.incarnation.hex(),
        at_s=time.time(),
        connections=tuple(map(_connection, connections[:SNAPSHOT_ROWS_MAX])),
        transfers=transfer_snapshots(registry.views(SNAPSHOT_ROWS_MAX)),
        open_connections=len(connections),
        open_transfers=len(registry.live),
        asked=tuple(printable(name) for name in asked),
        parts=tuple(look(part) for part, look in _parts.get(services.loop, {}).items()),
        quarantined_bytes=services.buffers.quarantined_bytes,
        counters=msgspec.structs.asdict(services.counters),
    )


def transfer_snapshots(views: Sequence[TransferView]) -> tuple[TransferSnapshot, ...]:
    """Return snapshots of transfers; call it on their loop."""
    return tuple(map(_transfer, views))


def _transfer(view: TransferView) -> TransferSnapshot:
    progress = view.progress
    silent = [
        f"{printable(c.peer.name)} is silent for {c.silent_s:.1f} s"
        for c in view.links
        if c.silent_s >= SILENCE_S
    ]
    return TransferSnapshot(
        id=text_of(view.id)[:NAME_CHARS_MAX],
        side="incoming" if view.receives else "outgoing",
        peers=tuple(printable(c.peer.name) for c in view.links),
        age_s=view.age_s,
        layers=progress.layers,
        layers_marked=progress.marked,
        layers_landed=progress.landed,
        nbytes=progress.nbytes,
        landed_bytes=progress.landed_bytes,
        waits_for="; ".join((view.next_move.text, *silent)),
        waits_on=view.next_move.by,
    )


def _connection(connection: Connection) -> ConnectionSnapshot:
    peer = connection.peer
    core = connection._core
    driver = connection._driver
    return ConnectionSnapshot(
        peer=printable(peer.name),
        address=str(peer.address or ""),
        transport=connection.transport,
        state=core.phase.value,
        age_s=driver.age_s,
        silent_s=driver.silent_s,
        queued_bytes=driver.link.queued_bytes,
        requests=core.open_requests,
        unreceived=sum(connection.unreceived.values()),
    )
