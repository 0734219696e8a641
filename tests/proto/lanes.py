"""A pair of cores with lanes, and what tests of them ask again and again."""

from __future__ import annotations

from kvwire.errors import ProtocolError
from kvwire.limits import CHUNK_BYTES_MIN
from kvwire.proto.lanes import LaneStage
from kvwire.proto.requests import RequestRecord
from kvwire.types import Role, TrustMode
from kvwire.wire.control import Body, decode_body
from kvwire.wire.header import FrameType, decode_header
from tests.support.core_pair.pair import ConnectionPair
from tests.support.core_pair.pair_lanes import Half, PairLanes
from tests.support.core_pair.peer import Peer

CHUNK = CHUNK_BYTES_MIN


class Scene:
    """A pair with lanes, and memory of the server to put into and get from."""

    def __init__(self, chunks: int = 3, trust: TrustMode = TrustMode.LOOPBACK) -> None:
        self.pair = ConnectionPair(trust=trust)
        self.lanes = PairLanes(self.pair)
        self.client, self.server = self.pair.client, self.pair.server
        # The last chunk is a short one.
        self.data = bytes(range(1, 252)) * (chunks * CHUNK // 251)
        self.region = self.server.expose(len(self.data))
        self.grant = self.server.grant(self.region)

    def up(self) -> int:
        """A lane that both ends send on."""
        number = self.lanes.raise_one()
        self.lanes.via = dict.fromkeys(Role, number)
        return number

    def half(self, role: Role, number: int = 1) -> Half:
        return self.lanes.halves[role, number]

    def stage(self, role: Role, number: int = 1) -> LaneStage:
        """How far a lane is; one that is forgotten is down."""
        lane = self.pair.of(role).core.lanes._lanes.get(number)
        return LaneStage.CLOSED if lane is None else lane.stage

    def put(self) -> RequestRecord:
        return self.client.put(self.data, self.grant)

    def descriptors(self, role: Role, number: int = 1) -> list[int]:
        return list(self.half(role, number).arriving)

    def said(self, frame_type: FrameType, peer: Peer) -> list[Body]:
        """What one end has on its wire of a type, in loopback mode."""
        return [
            decode_body(frame_type, body)
            for header, body in peer.wire
            if decode_header(header).type == frame_type
        ]


def expect_refused(scene: Scene, peer: Peer, rule: str) -> None:
    """One end has found that the other one broke a rule."""
    scene.pair.run()
    assert isinstance(peer.broken, ProtocolError)
    assert peer.broken.rule == rule


def expect_whole(scene: Scene, request: RequestRecord) -> None:
    """All bytes are there, and the sender's memory is free."""
    assert scene.client.error(request) is None
    assert scene.server.content(scene.region.buffer) == scene.data
    assert request.buffer in scene.client.freed
