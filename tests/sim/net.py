"""The wire: frames in flight between two processes, in virtual time.

A wire has two *ends*, each in the hands of one process, and a *lane* each way
(:mod:`tests.sim.lane`), which keeps its frames in order. Separate queues for
control and data are more lanes of one wire; today's core numbers all frames of a link
together and so has one.

The wire keeps the promises of :mod:`kvwire.backend`, in the least helpful way they
allow. The completion of a frame comes some time after its delivery, in any order, or
not before the end of the link. After an abort the wire still works on what was handed
over until it reports ``link_closed``. What breaks these promises is a
:class:`~tests.sim.tamper.Tamper`, and whoever accepts such a frame fails the
seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import ConnectionLost
from kvwire.proto.chunks import Chunk
from tests.sim.lane import Frame, Handler, Lane

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

# How long a link that closes waits for a peer that takes nothing more; TCP is given a
# limit of its own for this as well.
LINGER_S = 5.0


class End:
    """One end of a wire, as the process that has it sees it.

    Attributes:
        handler: Who is told; set once, before anything is sent.
        out: The lane that leads away, once the wire is whole.
        aborted: This side wants to hear no more, and is not rid of the wire yet.
        closed: The wire touches nothing of this side any more.
        delivered_bytes: Of the frames and halves of frames that were delivered.
        heard_at: When bytes were last delivered.
    """

    handler: Handler
    out: Lane
    into: Lane

    def __init__(self, world: World, node: Node) -> None:
        self.node = node
        self.aborted = False
        self.closed = False
        self.delivered_bytes = 0
        self.heard_at = world.now
        self._closing = False
        self._world = world

    @property
    def queued_bytes(self) -> int:
        """Bytes that have not arrived yet."""
        return self.out.queued_bytes

    @property
    def received_bytes(self) -> int:
        """As :attr:`kvwire.backend.Link.received_bytes`."""
        return self.delivered_bytes + self.into.trickled_bytes

    @property
    def ending(self) -> bool:
        """Whether nothing more can be sent."""
        return self.closed or self.aborted or self._closing

    def send(self, frame: Frame) -> None:
        """Send a frame; does nothing when the link is ending."""
        if not self.ending:
            self.out.put(frame)

    def sent(self, chunk: Chunk) -> None:
        """A completion has come."""
        if not self.closed:
            self.handler.frame_sent(chunk)

    def close(self) -> None:
        """Send what is queued, then end."""
        if self.ending:
            return
        self._closing = True
        self.out.close()
        self.node.after(LINGER_S, self._give_up)

    def abort(self) -> None:
        """End now. What was handed over before may go on for a while."""
        if self.closed or self.aborted:
            return
        self.aborted = True
        world = self._world
        late_s = world.latency()
        self.node.after(late_s, self.into.late_access)
        self.node.after(late_s + world.latency(), self.finish, None)
        self.out.target.break_off()

    def break_off(self) -> None:
        """The wire has broken somewhere: tell this side, at once, later or never."""
        if self.closed:
            return
        world = self._world
        if not world.is_silent():
            error = ConnectionLost("the link was reset")
            self.node.after(2 * world.latency(), self.finish, error)

    def finish(self, error: ConnectionLost | None) -> None:
        """From here on the wire touches nothing of this side."""
        if self.closed:
            return
        self.closed = True
        self.into.drop(copies=False)
        self.out.drop(copies=True)
        self.handler.link_closed(error)

    def vanish(self) -> None:
        """The process is gone, and its end of the wire with it."""
        self.closed = True
        self.into.drop(copies=False)
        self.out.drop(copies=True)
        self.out.target.break_off()

    def _give_up(self) -> None:
        self.finish(ConnectionLost("the peer took nothing more"))


class Wire:
    """A link between two processes.

    Attributes:
        ends: Of the side that connected, and of the other.
        disturbed: It was cut, blocked or tampered with.
    """

    def __init__(self, world: World, client: Node, server: Node) -> None:
        self.ends = (End(world, client), End(world, server))
        self.disturbed = False
        self.is_cut = False
        for here, there in (self.ends, self.ends[::-1]):
            here.out = there.into = Lane(world, self, here, there)

    @property
    def healthy(self) -> bool:
        """Whether whatever one side says reaches the other, and without delay."""
        return not self.disturbed and not any(
            end.closed or end.aborted or end.node.dead or end.node.was_late
            for end in self.ends
        )

    def cut(self) -> None:
        """Lose everything under way; each side may or may not be told."""
        self.is_cut = True
        for end in self.ends:
            end.out.drop(copies=False)
            end.out.block(float("inf"))
            end.break_off()
