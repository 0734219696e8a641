"""What the simulated applications have asked for, and what would be right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import KVWireError
from kvwire.proto.regions import GrantRow, RegionRecord
from kvwire.proto.requests import RequestRecord
from kvwire.proto.state import RequestKind
from kvwire.types import BufferId, Generation
from tests.sim.memory import Lease

if TYPE_CHECKING:
    from tests.sim.endpoint import Endpoint
    from tests.sim.node import Node


class Message:
    """One message, as its sender meant it.

    Attributes:
        serial: Names its content.
        place: How many messages of this tag were sent before it on this connection.
        eager: It travels in a frame of its own, unasked.
        landed: That frame has arrived intact.
        taken: A receive has returned it.
    """

    __slots__ = ("eager", "landed", "nbytes", "place", "serial", "tag", "taken")

    def __init__(self, serial: int, tag: int, place: int, nbytes: int) -> None:
        self.serial = serial
        self.tag = tag
        self.place = place
        self.nbytes = nbytes
        self.eager = False
        self.landed = False
        self.taken = False


class SimRegion:
    """Registered memory of a node.

    Attributes:
        core: What the protocol knows of it.
        lease: The memory.
    """

    __slots__ = ("core", "lease", "node")

    def __init__(self, node: Node, core: RegionRecord, lease: Lease) -> None:
        self.node = node
        self.core = core
        self.lease = lease


class Known:
    """A grant, as the side that may use it knows it."""

    __slots__ = ("holder", "region", "row")

    def __init__(self, holder: Endpoint, region: SimRegion, row: GrantRow) -> None:
        self.holder = holder
        self.region = region
        self.row = row


class Aim:
    """Which memory a put or get is meant to reach.

    Attributes:
        offset: From the beginning of the region.
        generation: Of the grant it uses.
        wrong: What its owner has to refuse it for; "" if it has the right.
    """

    __slots__ = ("generation", "offset", "region", "wrong")

    def __init__(
        self, region: SimRegion, generation: Generation, offset: int, wrong: str
    ) -> None:
        self.region = region
        self.generation = generation
        self.offset = offset
        self.wrong = wrong

    @property
    def current(self) -> bool:
        """Whether the region is still what it was when the grant was made."""
        core = self.region.core
        return core.open and core.generation == self.generation


class Part:
    """One segment of a KV transfer, on either side.

    Attributes:
        serial: Names its content.
        covered: Consumer: bytes that have landed intact.
        landed: Consumer: the core has said that it is all here.
    """

    __slots__ = ("buffer", "covered", "landed", "lease", "nbytes", "serial")

    def __init__(self, serial: int, nbytes: int) -> None:
        self.serial = serial
        self.nbytes = nbytes
        self.buffer: BufferId | None = None
        self.lease: Lease | None = None
        self.covered = 0
        self.landed = False


class Ask:
    """One request of an application.

    Attributes:
        nbytes: Its bytes; for a RECV, how many it can take.
        serial: Names the content of a SEND or PUT.
        place: Of a RECV: how many receives of its tag were posted before.
        message: What a SEND sends, or what a RECV is known to receive.
        aim: Of a PUT or GET.
        covered: Bytes that have landed where they belong.
        read: Of a GET: what the link read from the region.
        parts: Of a KV transfer: its segments, by number.
        committed: Of one that is produced here: nothing more will be marked.
        cancelled: Its own side has cancelled or withdrawn it.
        over: Its completion has come.
        error: And what it said.
    """

    __slots__ = (
        *("aim", "buffer", "cancelled", "committed", "core", "covered", "deadline"),
        *("endpoint", "error", "kind", "lease", "message", "nbytes", "over", "parts"),
        *("place", "read", "serial", "tag"),
    )

    core: RequestRecord

    def __init__(
        self,
        endpoint: Endpoint,
        kind: RequestKind,
        nbytes: int,
        *,
        serial: int = 0,
        tag: int = 0,
        place: int = 0,
        deadline: float | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.kind = kind
        self.nbytes = nbytes
        self.serial = serial
        self.tag = tag
        self.place = place
        self.deadline = deadline
        self.buffer: BufferId | None = None
        self.lease: Lease | None = None
        self.message: Message | None = None
        self.aim: Aim | None = None
        self.covered = 0
        self.read = bytearray()
        self.parts: dict[int, Part] = {}
        self.committed = False
        self.cancelled = False
        self.over = False
        self.error: KVWireError | None = None

    def __str__(self) -> str:
        return f"{self.kind.value} of {self.nbytes} bytes on {self.endpoint.name}"


class Mailbox:
    """The messages of one tag, one way over one connection.

    Attributes:
        messages: In the order in which they were sent.
        receives: How many receives were posted for them.
        refused: How many receives without a buffer have refused a message.
        taken: (place of the receive, place of the message) of each that was returned.
    """

    __slots__ = ("messages", "receives", "refused", "taken")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.receives = 0
        self.refused = 0
        self.taken: list[tuple[int, int]] = []
