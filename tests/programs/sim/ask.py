"""What the simulated applications have asked for, and what would be right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.errors import KVWireError
from kvwire.proto.records import RequestRecord
from kvwire.proto.regions import GrantRow, RegionRecord
from kvwire.proto.state import RequestKind
from kvwire.types import BufferId, Generation
from tests.programs.sim.memory import Lease

if TYPE_CHECKING:
    from tests.programs.sim.endpoint import Endpoint


@dataclass(slots=True, eq=False)
class Message:
    """One message, as its sender meant it.

    Attributes:
        place: How many messages of this tag were sent before it on this connection.
        eager: It travels in a frame of its own, unasked.
    """

    serial: int
    tag: int
    place: int
    nbytes: int
    eager: bool = False
    landed: bool = False
    taken: bool = False


@dataclass(slots=True, eq=False)
class Known:
    """A grant, as the side that may use it knows it."""

    holder: Endpoint
    region: RegionRecord
    row: GrantRow


@dataclass(slots=True, eq=False)
class Aim:
    """Which memory a put or get is meant to reach.

    Attributes:
        wrong: What its owner has to refuse it for; "" if it has the right.
    """

    region: RegionRecord
    generation: Generation
    offset: int
    wrong: str

    @property
    def current(self) -> bool:
        """Whether the region is still what it was when the grant was made."""
        return self.region.open and self.region.generation == self.generation


@dataclass(slots=True, eq=False)
class Part:
    """One segment of a KV transfer, on either side.

    Attributes:
        covered: Consumer: bytes that have landed intact.
        landed: Consumer: the core has said that it is all here.
    """

    serial: int
    nbytes: int
    buffer: BufferId | None = None
    lease: Lease | None = None
    covered: int = 0
    landed: bool = False


@dataclass(frozen=True, slots=True)
class Ticket:
    """Blocks of a window in a row, with the generations they had when offered."""

    first: int
    generations: tuple[int, ...]


@dataclass(slots=True, eq=False)
class SimWindow:
    """A window of a node: each block's generation names its content.

    Attributes:
        waits: Its memory is in use until each reader has answered, as if on a lane.
        users: Readers that are waited for, and gets that are being served.
        tickets: What was ever offered of it.
    """

    name: str
    lease: Lease
    block_bytes: int
    waits: bool
    generations: list[int] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    users: int = 0
    closed: bool = False
    freed: bool = False

    @property
    def geometry(self) -> bytes:
        """How the owner describes it."""
        return self.name.encode()

    def stale(self, ticket: Ticket) -> list[bool]:
        """For each block of a ticket, whether it has another generation now."""
        now = self.generations[ticket.first : ticket.first + len(ticket.generations)]
        return [a != b for a, b in zip(now, ticket.generations, strict=True)]

    def unused(self) -> None:
        """One user less."""
        self.users -= 1
        self.release_if_unused()

    def release_if_unused(self) -> None:
        """Give back the memory of a window that was closed, after its last user."""
        if self.closed and not self.users and not self.freed:
            self.freed = True
            self.lease.free()


@dataclass(slots=True, eq=False)
class ShownWindow:
    """A window of this side that the peer has open, with the views it reported."""

    number: int
    window: SimWindow
    views: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class OpenedWindow:
    """A window of the peer that this side has open, with the views it reported.

    Attributes:
        ending: The owner has closed it; this side will answer.
    """

    number: int
    window: SimWindow
    views: dict[int, bytes] = field(default_factory=dict)
    ending: bool = False
    closed: bool = False


@dataclass(slots=True, eq=False)
class Serving:
    """A get whose bytes the owner sends."""

    window: SimWindow
    ticket: Ticket
    buffer: BufferId


@dataclass(slots=True, eq=False)
class Ask:
    """One request of an application.

    Attributes:
        nbytes: Its bytes; for a RECV, how many it can take.
        serial: Names the content of a SEND or PUT.
        place: Of a RECV: how many receives of its tag were posted before.
        message: What a SEND sends, or what a RECV is known to receive.
        read: Of a GET or READ: what the link read from the peer's memory.
        window, opened, ticket: Of a READ: what it names; of an OPEN_WINDOW, the window
            alone, or None if there is none of the name it has.
        blind: Of a READ: it names a view that was not reported.
        parts: Of a KV transfer: its segments, by number.
        committed: Of one that is produced here: nothing more will be marked.
        cancelled: Its own side has cancelled or withdrawn it.
    """

    endpoint: Endpoint
    kind: RequestKind
    nbytes: int
    serial: int = 0
    tag: int = 0
    place: int = 0
    deadline: float | None = None
    core: RequestRecord = field(init=False)
    buffer: BufferId | None = None
    lease: Lease | None = None
    message: Message | None = None
    aim: Aim | None = None
    covered: int = 0
    read: bytearray = field(default_factory=bytearray)
    window: SimWindow | None = None
    opened: OpenedWindow | None = None
    ticket: Ticket | None = None
    blind: bool = False
    parts: dict[int, Part] = field(default_factory=dict)
    committed: bool = False
    cancelled: bool = False
    over: bool = False
    error: KVWireError | None = None

    def __str__(self) -> str:
        return f"{self.kind.value} of {self.nbytes} bytes on {self.endpoint.name}"


@dataclass(slots=True, eq=False)
class Mailbox:
    """The messages of one tag, one way over one connection.

    Attributes:
        messages: In the order in which they were sent.
        refused: How many receives without a buffer have refused a message.
        taken: (place of the receive, place of the message) of each that was returned.
    """

    messages: list[Message] = field(default_factory=list)
    receives: int = 0
    refused: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list)
