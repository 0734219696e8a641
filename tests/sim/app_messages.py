"""Messages of a simulated application, of every size around every border."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.errors import ConnectionClosed
from kvwire.limits import EAGER_BYTES_MAX
from kvwire.proto.events import MemoryWanted
from kvwire.proto.state import RequestKind
from tests.sim.ask import Ask, Message
from tests.sim.content import content
from tests.sim.endpoint import Endpoint
from tests.sim.lane import Frame
from tests.sim.plan import Dice

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

# A small one, and one that needs all 64 bits.
_TAGS: Final = (7, 2**64 - 1)


class MessageApp:
    """What an application does with messages."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node

    def send(self, endpoint: Endpoint, dice: Dice) -> None:
        """Send a message: at once if small and there is credit, else announced."""
        world, core = self._world, endpoint.core
        nbytes, tag = endpoint.size(dice), _tag(dice)
        box = endpoint.end.out.mailbox(tag)
        message = Message(world.next_serial(), tag, len(box.messages), nbytes)
        data = content(message.serial, nbytes)
        header = None
        if nbytes <= EAGER_BYTES_MAX:
            check = 0 if world.plan.setup.checked else None
            try:
                header = core.eager_header(tag, nbytes, check)
            except ConnectionClosed:
                world.judge.truth.refused_as_closed(endpoint)
                return
        if header is not None:
            world.note(endpoint.name, "sends", tag, nbytes)
            box.messages.append(message)
            world.judge.eager_sent(message)
            endpoint.end.send(Frame(header, data, serial=message.serial))
            return
        deadline = endpoint.deadline(dice)
        ask = Ask(
            endpoint,
            RequestKind.SEND,
            nbytes,
            serial=message.serial,
            tag=tag,
            deadline=deadline,
        )
        ask.message = message
        app = self._node.app
        if app.start(ask, lambda lent: core.send(tag, lent, nbytes, deadline), data):
            box.messages.append(message)

    def recv(self, endpoint: Endpoint, dice: Dice) -> None:
        """Wait for a message, with memory or without, now and then too little."""
        tag, deadline = _tag(dice), endpoint.deadline(dice)
        with_buffer = dice.below(3) > 0
        nbytes = endpoint.size(dice)
        if not dice.one_in(4):
            nbytes = max(nbytes, endpoint.longest)
        self._receive(endpoint, tag, deadline, nbytes, with_buffer=with_buffer)

    def receive_all(self, endpoint: Endpoint) -> None:
        """Wait for a message of each tag."""
        for tag in _TAGS:
            self._receive(endpoint, tag, None, endpoint.longest)

    def take_what_is_there(self, endpoint: Endpoint) -> None:
        """Receive all that a connection which has ended has received."""
        for tag in _TAGS:
            while self._receive(endpoint, tag, None, endpoint.longest):
                pass

    def provide(self, endpoint: Endpoint, event: MemoryWanted) -> None:
        """Give a receive the memory it wants."""
        ask = event.request.context
        assert isinstance(ask, Ask)
        buffer, lease = self._node.lend(event.nbytes, writable=True)
        if not ask.over:
            ask.buffer, ask.lease = buffer, lease
        endpoint.core.messages.provide(event.request, buffer)

    def _receive(
        self,
        endpoint: Endpoint,
        tag: int,
        deadline: float | None,
        nbytes: int,
        *,
        with_buffer: bool = False,
    ) -> bool:
        core, box = endpoint.core, endpoint.end.into.mailbox(tag)
        ask = Ask(
            endpoint,
            RequestKind.RECV,
            nbytes,
            tag=tag,
            place=box.receives,
            deadline=deadline,
        )
        started = self._node.app.start(
            ask,
            lambda lent: core.recv(tag, lent, nbytes, deadline),
            b"\xee" * nbytes if with_buffer else None,
        )
        box.receives += started
        return started


def _tag(dice: Dice) -> int:
    return _TAGS[dice.one_in(3)]
