"""One side of a handshake on a wire, until there is a connection or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.errors import ConnectionLost, HandshakeError, ProtocolError
from kvwire.limits import HANDSHAKE_TIMEOUT_S
from kvwire.proto.agreement import Agreement
from kvwire.proto.chunks import Chunk
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.handshake import ClientHandshake, Handshake, ServerHandshake
from kvwire.types import Role
from kvwire.wire.control import (
    BackendOffer,
    HandshakeVerdict,
    TransportChoice,
    TransportOffer,
)
from tests.sim.endpoint import Endpoint
from tests.sim.lane import Frame, Landing
from tests.sim.net import End
from tests.sim.violation import demand

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

_TRANSPORT: Final = "inproc"


class Opening:
    """A handshake under way."""

    def __init__(self, world: World, node: Node, end: End, role: Role) -> None:
        self.endpoint: Endpoint | None = None
        self._world = world
        self._node = node
        self._end = end
        self._over = False
        self._handshake = _handshake(world, node, role)
        end.handler = self

    def begin(self) -> None:
        """Send what the handshake starts with, and give it limited time."""
        self._flush()
        self._node.after(HANDSHAKE_TIMEOUT_S, self._time_out)

    def header_received(self, frame: Frame) -> Landing | None:
        """See net.Handler."""
        if self._over:
            return None
        try:
            self._handshake.header_received(frame.header)
        except ProtocolError as exc:
            self._failed(exc)
            return None
        return Landing(None, None, 0)

    def body_received(
        self, frame: Frame, landing: Landing, data: bytes, *, intact: bool
    ) -> bool:
        """See net.Handler."""
        handshake = self._handshake
        try:
            handshake.body_received(data)
            if isinstance(handshake, ServerHandshake) and handshake.offer is not None:
                taken = HandshakeVerdict(_TRANSPORT, True, "the only one")
                handshake.choose(
                    TransportChoice(name=self._node.name, verdicts=(taken,), profile=())
                )
        except (HandshakeError, ProtocolError) as exc:
            self._failed(exc)
            return False
        self._flush()
        if handshake.agreement is not None:
            self._agree(handshake.agreement)
        return True

    def frame_sent(self, chunk: Chunk) -> None:
        """See net.Handler."""

    def link_writable(self) -> None:
        """See net.Handler."""

    def link_closed(self, error: ConnectionLost | None) -> None:
        """See net.Handler."""
        self._over = True

    def _agree(self, agreement: Agreement) -> None:
        node, end = self._node, self._end
        setup = self._world.plan.setup
        core = ConnectionCore(
            agreement,
            self._handshake.framing,
            node.holds,
            parameters=node.identity.parameters,
            ping_interval_s=setup.ping_interval_s,
            ping_misses=setup.ping_misses,
            now=node.clock,
        )
        self._over = True
        self.endpoint = endpoint = Endpoint(self._world, node, end, core)
        end.handler = endpoint
        self._world.agreed(endpoint)
        endpoint.beside.ask()
        endpoint.pump()

    def _flush(self) -> None:
        for header, body in self._handshake.outgoing:
            self._end.send(Frame(header, body))
        self._handshake.outgoing.clear()

    def _failed(self, error: HandshakeError | ProtocolError) -> None:
        """Say the last word, if there is one, and end the link after it."""
        self._world.note(self._node.name, "handshake failed", str(error))
        demand(
            self._end.into.tampered or self._end.out.tampered,
            "accused",
            f"an honest handshake is refused: {error}",
        )
        self._over = True
        self._flush()
        self._end.close()

    def _time_out(self) -> None:
        if not self._over:
            self._world.note(self._node.name, "handshake timed out")
            self._over = True
            self._end.abort()


def _handshake(world: World, node: Node, role: Role) -> Handshake:
    nonce = world.nonce()
    if role is Role.SERVER:
        return ServerHandshake(node.identity, nonce)
    offer = TransportOffer(
        name=node.name, backends=(BackendOffer(_TRANSPORT, 1),), profile=()
    )
    return ClientHandshake(node.identity, nonce, offer)
