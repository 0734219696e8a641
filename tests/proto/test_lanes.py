"""Lanes, step by step: coming up, payload, going down, and every rule of theirs."""

from __future__ import annotations

import pytest

from kvwire.limits import (
    CHUNK_BYTES_MIN,
    LANE_PAYLOADS_MAX,
    LANES_MAX,
    PING_INTERVAL_S,
    PING_MISSES,
)
from kvwire.proto.chunks import Chunk
from kvwire.proto.events import LaneAsked, LaneBootstrapped, LaneOpened, LaneStalled
from kvwire.proto.lanes import LaneStage
from kvwire.proto.records import RequestRecord
from kvwire.types import Role
from kvwire.wire.control import (
    Body,
    LaneAck,
    LaneClose,
    LaneData,
    LaneOpen,
    LaneReady,
    decode_body,
)
from kvwire.wire.header import Flag, FrameType, decode_header
from tests.proto.moving import expect_broken
from tests.support.core_pair.pair_lanes import BACKEND, Half, PairLanes
from tests.support.core_pair.peer import ConnectionPair, Peer

CLIENT, SERVER = Role.CLIENT, Role.SERVER
CHUNK = CHUNK_BYTES_MIN
PATIENCE_S = PING_INTERVAL_S * PING_MISSES


class Scene:
    """A pair with lanes, and memory of the server to put into and get from."""

    def __init__(self, chunks: int = 3) -> None:
        self.pair = ConnectionPair()
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

    def descriptors(self, role: Role) -> list[int]:
        return list(self.half(role).arriving)

    def said(self, frame_type: FrameType, peer: Peer) -> list[Body]:
        """What one end has on its wire of a type, in loopback mode."""
        return [
            decode_body(frame_type, body)
            for header, body in peer.wire
            if decode_header(header).type == frame_type
        ]


def expect_whole(scene: Scene, request: RequestRecord) -> None:
    """All bytes are there, and the sender's memory is free."""
    assert scene.client.error(request) is None
    assert scene.server.content(scene.region.buffer) == scene.data
    assert request.buffer in scene.client.freed


@pytest.mark.rule("KVW-LN-01", "KVW-LN-02", "keeps")
def test_a_lane_comes_up() -> None:
    """Asked for, answered, confirmed; in that order each side sees its part."""
    scene = Scene()
    assert scene.lanes.ask() == 1
    assert scene.stage(CLIENT) is LaneStage.ASKED
    scene.pair.deliver(scene.client)
    assert scene.stage(SERVER) is LaneStage.ANSWERED
    scene.pair.deliver(scene.server)
    assert scene.stage(CLIENT) is LaneStage.OPEN
    assert scene.stage(SERVER) is LaneStage.ANSWERED
    scene.pair.run()
    assert scene.stage(SERVER) is LaneStage.OPEN
    scene.client.core.lanes.end_initial_set()
    scene.pair.run()
    assert scene.server.core.lanes.initial_set_done
    assert scene.client.core.lanes.initial_set_done
    assert scene.server.events == [
        LaneAsked(lane=1, backend=BACKEND, bootstrap=b"the client's half"),
        LaneOpened(lane=1),
        LaneOpened(lane=0),
    ]
    assert scene.client.events == [
        LaneBootstrapped(lane=1, bootstrap=b"the server's half")
    ]
    assert scene.server.core.lanes.backend(1) == BACKEND


@pytest.mark.parametrize("late", ["answer", "raised"])
def test_a_client_that_has_given_up_hears_of_it_late(late: str) -> None:
    """LANE_OPEN and LANE_READY that were under way when a half went are no errors."""
    scene = Scene()
    scene.lanes.ask()
    scene.pair.deliver(scene.client)
    if late == "answer":
        scene.lanes.end(scene.half(CLIENT))
    else:
        scene.pair.deliver(scene.server)
        scene.lanes.end(scene.half(SERVER))
    scene.lanes.rest()
    assert scene.client.broken is scene.server.broken is None
    assert scene.stage(CLIENT) is scene.stage(SERVER) is LaneStage.CLOSED


def test_what_is_too_late_to_say_is_not_said() -> None:
    """The peer's half has gone while ours was being made."""
    scene = Scene()
    scene.lanes.ask()
    scene.lanes.end(scene.half(CLIENT), "the client thought better of it")
    scene.pair.deliver(scene.client)
    lanes = scene.server.core.lanes
    scene.pair.deliver(scene.client)
    assert scene.stage(SERVER) is LaneStage.CLOSING
    scene.server.wire.clear()
    lanes.answer(1, b"late")
    assert not scene.server.core.outbox.frames
    scene.client.core.lanes.ready(1)
    assert not scene.client.core.outbox.frames
    scene.client.core.lane_gone(1, "again")
    assert not scene.client.core.outbox.frames


OPEN_1 = LaneOpen(lane=1, backend=BACKEND, bootstrap=b"")
DATA_1 = LaneData(lane=1, segment=0, offset=0, nbytes=1, check=None, descriptor=b"")
CLOSE_1 = LaneClose(lane=1, reason="", seen=3, missed=(1,))
ABOUT_1 = (
    (FrameType.LANE_READY, LaneReady(lane=1)),
    (FrameType.LANE_CLOSE, LaneClose(lane=1, reason="", seen=0, missed=())),
    (FrameType.LANE_ACK, LaneAck(lane=1, count=0)),
    (FrameType.LANE_DATA, DATA_1),
)
# When who says what that breaks which rule.
WRONG: list[tuple[str, str, Role, FrameType, Body]] = [
    *(
        ("KVW-LN-01", "new", CLIENT, FrameType.LANE_OPEN, LaneOpen(n, BACKEND, b""))
        for n in (2, 16)
    ),
    ("KVW-LN-01", "up", SERVER, FrameType.LANE_OPEN, OPEN_1),
    ("KVW-LN-02", "new", CLIENT, FrameType.LANE_READY, LaneReady(1)),
    ("KVW-LN-02", "chosen", CLIENT, FrameType.LANE_READY, LaneReady(0)),
    ("KVW-LN-02", "chosen", CLIENT, FrameType.LANE_READY, LaneReady(1)),
    ("KVW-LN-02", "up", CLIENT, FrameType.LANE_READY, LaneReady(1)),
    *(
        ("KVW-LN-03", state, CLIENT, FrameType.LANE_DATA, DATA_1)
        for state in ("new", "asked", "ending")
    ),
    *(
        ("KVW-LN-05", "sending", SERVER, FrameType.LANE_ACK, LaneAck(*said))
        for said in ((1, 4), (1, 2**63 - 1), (2, 0))
    ),
    # Its chunk would be sent again and be there twice.
    (
        *("KVW-LN-06", "missing", SERVER, FrameType.LANE_CLOSE),
        LaneClose(lane=1, reason="", seen=3, missed=(0, 1)),
    ),
    *(
        ("KVW-LN-08", state, CLIENT, *said)
        for state in ("over", "forgotten")
        for said in ABOUT_1
    ),
]


def in_state(state: str) -> Scene:
    scene = Scene()
    if state not in ("new", "asked", "chosen"):
        scene.up()
    match state:
        case "asked":
            scene.lanes.ask()
            scene.pair.deliver(scene.client)
        case "chosen":
            scene.client.core.lanes.end_initial_set()
            scene.client.collect()
        case "sending":
            scene.put()
        case "missing":
            scene.put()
            scene.server.forge(FrameType.LANE_CLOSE, CLOSE_1)
        case "ending" | "over" | "forgotten":
            scene.lanes.end(scene.half(CLIENT))
    if state in ("over", "forgotten"):
        scene.lanes.rest()
    if state == "forgotten":
        scene.up()
    return scene


@pytest.mark.rule("KVW-LN-01", "KVW-LN-02", "KVW-LN-03", "breaks")
@pytest.mark.rule("KVW-LN-05", "KVW-LN-06", "KVW-LN-08", "breaks")
def test_what_breaks_a_rule() -> None:
    """Out of turn, twice, of what was not sent, or of a lane that is over."""
    for rule, state, role, frame_type, body in WRONG:
        scene = in_state(state)
        request = 1 if frame_type is FrameType.LANE_DATA else 0
        scene.pair.of(role).forge(frame_type, body, request=request)
        expect_broken(scene.pair, scene.pair.of(role.other), rule)


@pytest.mark.rule("KVW-LN-03", "KVW-LN-05", "keeps")
@pytest.mark.parametrize("backwards", [False, True])
def test_payload_in_any_order(backwards: bool) -> None:
    """LANE_ACK counts those that came without a gap; memory is held until then."""
    scene = Scene()
    scene.up()
    request = scene.put()
    scene.pair.run()
    descriptors = scene.descriptors(SERVER)
    assert len(descriptors) == 3
    for done, descriptor in enumerate(
        descriptors[::-1] if backwards else descriptors, 1
    ):
        scene.lanes.move(scene.half(SERVER), descriptor)
        counts = [
            body.count
            for body in scene.said(FrameType.LANE_ACK, scene.server)
            if isinstance(body, LaneAck)
        ]
        whole = 3 if done == 3 else 0
        assert counts == ([whole] if backwards and whole else counts)
        assert max(counts, default=0) == (whole if backwards else done)
    scene.pair.run()
    assert request.buffer in scene.client.memory
    for descriptor in descriptors:
        scene.lanes.sent(scene.half(CLIENT), descriptor)
    expect_whole(scene, request)


def announced(scene: Scene, chunk: Chunk, check: int | None) -> tuple[bytes, bytes]:
    """Put a chunk on lane 1."""
    half = scene.half(CLIENT)
    half.sending[99] = chunk
    half.unread.add(99)
    descriptor = (99).to_bytes(8, "little")
    return scene.client.core.lanes.announce(chunk, 1, descriptor, check)


@pytest.mark.parametrize("check", [None, 0, 5])
def test_what_is_announced_is_what_is_checked(check: int | None) -> None:
    """The receiving half hears whether the payload has a checksum, and which."""
    scene = Scene(chunks=1)
    scene.up()
    scene.client.aside = lambda peer, chunk, _: announced(scene, chunk, check)
    scene.put()
    scene.pair.run()
    (arrival,) = scene.half(SERVER).arriving.values()
    assert bool(arrival.header.flags & Flag.CHECKED) is (check is not None)
    assert arrival.header.payload_check == (check or 0)
    assert scene.server.core.lanes.expects(arrival)
    scene.lanes.end(scene.half(SERVER))
    assert not scene.server.core.lanes.expects(arrival), "it was missed"


@pytest.mark.parametrize("cut", [False, True])
def test_payload_of_a_request_that_is_over_goes_nowhere(cut: bool) -> None:
    """It is received all the same, and the sender's memory held until it is."""
    scene = Scene(chunks=1)
    scene.up()
    request = scene.put()
    scene.server.revoke(scene.region)
    scene.pair.run()
    (descriptor,) = scene.descriptors(SERVER)
    assert scene.half(SERVER).arriving[descriptor].buffer is None
    assert request.buffer in scene.client.memory
    if cut:
        scene.lanes.end(scene.half(SERVER))
    scene.lanes.rest()
    assert request.buffer in scene.client.freed
    assert scene.server.content(scene.region.buffer) == bytes(len(scene.data))


def test_a_lane_takes_no_more_than_its_window() -> None:
    """Bytes of which the fate is not known; at least one chunk is always taken."""
    scene = Scene()
    scene.up()
    lanes = scene.client.core.lanes
    assert lanes.room(1, 1)
    scene.put()
    assert not lanes.room(1, len(scene.data))
    assert lanes.room(1, len(scene.data) + 1)
    scene.lanes.rest()
    assert lanes.room(1, 1)


@pytest.mark.rule("KVW-LN-04", "keeps")
def test_a_lane_takes_no_more_payloads_than_the_receiver_allows() -> None:
    """The first one of which nothing is known stops it, whatever came after."""
    scene = Scene()
    scene.up()
    small = scene.server.grant(scene.region, 0, 1)
    for _ in range(LANE_PAYLOADS_MAX + 5):
        scene.client.put(b"x", small)
    scene.pair.run()
    descriptors = scene.descriptors(SERVER)
    assert len(descriptors) == LANE_PAYLOADS_MAX
    assert not scene.client.core.lanes.room(1, 2**30)
    for descriptor in descriptors[1:]:
        scene.lanes.move(scene.half(SERVER), descriptor)
    scene.pair.run()
    assert not scene.client.core.lanes.room(1, 2**30)
    scene.lanes.rest()
    assert scene.client.core.lanes.room(1, 2**30)
    scene.client.put(b"x", small)
    scene.pair.run()
    assert len(scene.descriptors(SERVER)) == 1, "those before have made room"
    assert scene.server.broken is None


@pytest.mark.rule("KVW-LN-04", "breaks")
@pytest.mark.parametrize("down", [False, True])
def test_too_many_payloads_on_a_lane(down: bool) -> None:
    """Also while the receiver's half is gone and the sender cannot know it yet."""
    scene = Scene()
    scene.up()
    grant = scene.server.grant(scene.region, 0, 1)
    scene.client.aside = lambda peer, chunk, check: announced(scene, chunk, None)
    lanes = scene.client.core.lanes
    if down:
        scene.lanes.end(scene.half(SERVER))
    for _ in range(LANE_PAYLOADS_MAX + 1):
        lanes._lanes[1].waiting.clear()
        scene.client.put(b"x", grant)
    while scene.client.wire:
        scene.pair.deliver(scene.client)
    assert scene.server.broken is not None
    assert scene.server.broken.rule == "KVW-LN-04"


@pytest.mark.rule("KVW-LN-06", "keeps")
@pytest.mark.parametrize("role", list(Role))
def test_what_was_missed_is_sent_again(role: Role) -> None:
    """Whoever's half breaks: the second of three has arrived, the others have not."""
    scene = Scene()
    scene.up()
    request = scene.put()
    scene.pair.run()
    scene.lanes.move(scene.half(SERVER), scene.descriptors(SERVER)[1])
    scene.lanes.end(scene.half(role))
    if role is CLIENT:
        scene.pair.run()
        scene.lanes.end(scene.half(SERVER))
    (lower,) = scene.said(FrameType.LANE_CLOSE, scene.server)
    assert isinstance(lower, LaneClose)
    assert (lower.seen, lower.missed) == (3, (0, 2))
    scene.lanes.rest()
    expect_whole(scene, request)


def test_the_end_of_the_wire_frees_what_lanes_are_through_with() -> None:
    """Fates do not matter then; what a lane may touch is held on."""
    scene = Scene(chunks=2)
    scene.up()
    request = scene.put()
    scene.pair.run()
    first, second = scene.descriptors(SERVER)
    scene.lanes.move(scene.half(SERVER), first)
    scene.lanes.sent(scene.half(CLIENT), first)
    scene.client.lose()
    assert request.buffer in scene.client.memory
    scene.lanes.end(scene.half(CLIENT))
    assert request.buffer in scene.client.freed
    assert second in scene.half(SERVER).arriving


@pytest.mark.rule("KVW-LN-01", "keeps")
def test_so_many_lanes_at_once_and_no_more() -> None:
    """One that is over makes room for another, whose number is new."""
    scene = Scene()
    for number in range(1, LANES_MAX + 1):
        assert scene.lanes.raise_one() == number
    assert scene.client.core.lanes.next_number() is None
    scene.lanes.end(scene.half(CLIENT, 3))
    scene.pair.run()
    assert scene.client.core.lanes.next_number() is None
    scene.lanes.rest()
    assert scene.lanes.raise_one() == LANES_MAX + 1
    assert scene.stage(SERVER, LANES_MAX + 1) is LaneStage.OPEN
    assert scene.client.core.lanes.next_number() is None


@pytest.mark.rule("KVW-LN-08", "keeps")
@pytest.mark.parametrize("refuses", [True, False])
def test_a_connection_lives_longer_than_any_number_of_its_lanes(refuses: bool) -> None:
    """Each breaks or never comes, has a number of its own, and is forgotten."""
    scene = Scene()
    scene.lanes.refuses = refuses
    for number in range(1, 10 * LANES_MAX):
        assert scene.lanes.raise_one() == number
        if not refuses:
            scene.lanes.via[CLIENT] = number
            request = scene.put()
            scene.lanes.end(scene.half(SERVER, number))
            scene.lanes.rest()
            expect_whole(scene, request)
        scene.lanes.rest()
        for peer in (scene.client, scene.server):
            assert len(peer.core.lanes._lanes) == 1
    assert scene.client.broken is scene.server.broken is None


# --- a path that is lost --------------------------------------------------------------


def stalls(peer: Peer) -> list[str]:
    """What one end was told of lanes that lost their path."""
    return [event.reason for event in peer.events if isinstance(event, LaneStalled)]


@pytest.mark.parametrize("lost", [CLIENT, SERVER])
def test_payload_of_a_lost_path_goes_elsewhere(lost: Role) -> None:
    """The receiver notices, within the time in which it would notice a dead peer."""
    scene = Scene()
    scene.up()
    request = scene.put() if lost is SERVER else scene.client.get(scene.grant)
    scene.pair.run()
    assert len(scene.descriptors(lost)) == 3
    scene.lanes.move(scene.half(lost), scene.descriptors(lost)[0])
    scene.pair.advance(PATIENCE_S - 0.1)
    assert not stalls(scene.pair.of(lost))
    scene.pair.advance(PING_INTERVAL_S)
    (reason,) = stalls(scene.pair.of(lost))
    assert "nothing has arrived for" in reason
    scene.half(lost).arriving.clear()
    scene.lanes.rest()
    assert scene.client.error(request) is None
    assert scene.stage(CLIENT) is scene.stage(SERVER) is LaneStage.CLOSED
    assert not stalls(scene.pair.of(lost.other))


def test_memory_that_a_lost_path_keeps_is_given_back() -> None:
    """All has arrived, but the sender's half is never through with it."""
    scene = Scene(chunks=1)
    scene.up()
    request = scene.put()
    scene.pair.run()
    (descriptor,) = scene.descriptors(SERVER)
    scene.lanes.move(scene.half(SERVER), descriptor)
    scene.pair.advance(PATIENCE_S + PING_INTERVAL_S)
    (reason,) = stalls(scene.client)
    assert "nothing has left for" in reason
    assert request.buffer in scene.client.memory
    scene.half(CLIENT).sending.clear()
    scene.lanes.rest()
    expect_whole(scene, request)


def test_a_receiver_may_be_slow_and_not_for_ever() -> None:
    """The sender waits twice as long for payload that has not arrived."""
    scene = Scene(chunks=1)
    scene.up()
    scene.put()
    scene.pair.run()
    (arrival,) = scene.half(SERVER).arriving.values()
    # It is being copied to its place, which is not the lane's business.
    scene.server.core.lanes.payload_staged(arrival)
    scene.pair.advance(2 * PATIENCE_S - 0.1)
    assert not stalls(scene.client)
    scene.pair.advance(PING_INTERVAL_S)
    assert stalls(scene.client)
    assert not stalls(scene.server)
    scene.lanes.end(scene.half(SERVER))
    scene.server.core.lanes.payload_staged(arrival)  # too late


@pytest.mark.parametrize("received", [True, False])
def test_bytes_of_a_payload_are_a_movement(received: bool) -> None:
    scene = Scene(chunks=1)
    scene.up()
    scene.put()
    scene.pair.run()
    for step in range(20):
        scene.server.core.lanes.note_bytes(1, step * received, 0)
        scene.client.core.lanes.note_bytes(1, 0, step)
        scene.pair.advance(PING_INTERVAL_S)
    assert bool(stalls(scene.server)) is not received
    assert not stalls(scene.client)


def test_a_read_of_a_window_counts_as_payload() -> None:
    scene = Scene()
    scene.up()
    lanes = scene.client.core.lanes
    scene.pair.advance(3 * PATIENCE_S)
    for _ in range(2):
        lanes.read_begun(1)
        scene.pair.advance(PATIENCE_S / 2)
        lanes.read_over(1)
    scene.pair.advance(3 * PATIENCE_S)
    assert not stalls(scene.client)
    lanes.read_begun(1)
    scene.pair.advance(PATIENCE_S + PING_INTERVAL_S)
    assert "nothing has arrived" in stalls(scene.client)[0]
    scene.lanes.rest()
    lanes.read_over(1)
    lanes.read_begun(99)  # a lane that is forgotten
    lanes.read_over(99)


def test_our_own_delay_is_not_the_lanes() -> None:
    """After an hour in which nothing ran, payload has its time again."""
    scene = Scene()
    scene.up()
    scene.put()
    scene.pair.run()
    now = scene.server.now
    lanes = scene.server.core.lanes
    for at in (now + 1, now + 3600, now + 3601):
        lanes.look(at)
    scene.server.collect()
    assert not stalls(scene.server)
    for second in range(8):
        lanes.look(now + 3602 + second)
    scene.server.collect()
    assert len(stalls(scene.server)) == 1
