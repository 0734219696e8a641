"""Lanes: whatever breaks and whatever comes first, each chunk arrives once.

The two ends are whole cores. Their lanes read the sender's memory at the moment when a
payload moves, so memory that is given back too early is found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.proto.lanes import LaneStage
from kvwire.proto.requests import RequestRecord
from kvwire.types import TrustMode
from tests.proto.lanes import CHUNK, Scene
from tests.support.core_pair.peer import Peer
from tests.support.depth import examples


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.integers(0, 2**16), max_size=150),
    st.sampled_from(TrustMode),
    st.sampled_from((0, 2 * CHUNK)),
)
def test_every_byte_arrives_whatever_breaks(
    choices: list[int], trust: TrustMode, span_bytes: int
) -> None:
    """Each number chooses one of the things that could happen then."""
    scene = Scene(trust=trust)
    scene.lanes.span_bytes = span_bytes
    asked = Asked(scene)
    for choice in choices:
        possible = list(happenings(scene, asked))
        possible[choice % len(possible)]()
    scene.lanes.rest()
    asked.expect_all()
    for peer in (scene.client, scene.server):
        peer.close()
    scene.lanes.rest()
    for peer in (scene.client, scene.server):
        assert peer.broken is None
        assert peer.ended is not None
        assert peer.ended.graceful
    scene.server.close_region(scene.region)
    assert not len(scene.client.core.holds)
    assert not len(scene.server.core.holds)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 2**16), max_size=80))
def test_nothing_is_held_once_the_wire_and_the_lanes_are_gone(
    choices: list[int],
) -> None:
    """A lane that lives longer than the wire keeps the memory that it may touch."""
    scene = Scene()
    asked = Asked(scene)
    for choice in choices:
        possible = list(happenings(scene, asked))
        possible[choice % len(possible)]()
    for peer in (scene.client, scene.server):
        peer.lose()
        assert all(request in peer.done for request in asked.of(peer))
    for half in scene.lanes.halves.values():
        busy = list(half.sending.values())
        peer = scene.pair.of(half.role)
        assert all(chunk.buffer in peer.memory for chunk in busy)
        assert all(a.buffer in peer.memory for a in half.arriving.values() if a.buffer)
    scene.lanes.rest()
    scene.server.close_region(scene.region)
    assert not len(scene.client.core.holds)
    assert not len(scene.server.core.holds)


class Asked:
    """What was asked for, and what has to come of it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.puts: list[RequestRecord] = []
        self.gets: list[RequestRecord] = []
        self.messages: list[tuple[RequestRecord, RequestRecord]] = []

    def put(self) -> None:
        self.puts.append(self.scene.put())

    def get(self) -> None:
        self.gets.append(self.scene.client.get(self.scene.grant))

    def message(self) -> None:
        """From the server, and met at once."""
        tag = len(self.messages)
        received = self.scene.client.recv(tag, len(self.scene.data))
        sent = self.scene.server.send(tag, self.scene.data)
        assert sent is not None
        self.messages.append((sent, received))

    def of(self, peer: Peer) -> list[RequestRecord]:
        if peer is self.scene.server:
            return [sent for sent, _ in self.messages]
        return [*self.puts, *self.gets, *(received for _, received in self.messages)]

    @property
    def busy(self) -> bool:
        return len(self.puts) + len(self.gets) + len(self.messages) >= 6

    def expect_all(self) -> None:
        scene = self.scene
        for request in self.puts:
            assert scene.client.error(request) is None
        for request in self.gets:
            # Puts of the same memory may have come before or after, or in between.
            assert scene.client.error(request) is None
            got = scene.client.received(request)
            assert all(
                byte in (0, want) for byte, want in zip(got, scene.data, strict=True)
            )
        for sent, received in self.messages:
            assert scene.server.error(sent) is None
            assert scene.client.received(received) == scene.data
        if self.puts:
            assert scene.server.content(scene.region.buffer) == scene.data


def happenings(scene: Scene, asked: Asked) -> list[Callable[[], object]]:
    """All that could happen next: frames come, payload moves, halves break."""
    pair, lanes = scene.pair, scene.lanes
    possible: list[Callable[[], object]] = [
        partial(pair.deliver, scene.client),
        partial(pair.deliver, scene.server),
    ]
    if not asked.busy:
        possible += [asked.put, asked.get, asked.message]
    number = scene.client.core.lanes.next_number()
    living = sum(not half.gone for half in lanes.halves.values())
    if number is not None and living < 8:
        possible.append(lanes.ask)
    for half in lanes.halves.values():
        if half.gone:
            continue
        if scene.stage(half.role, half.number) is LaneStage.OPEN:
            possible.append(partial(lanes.via.update, {half.role: half.number}))
        possible.append(partial(lanes.end, half))
        # A lane need not keep the order.
        possible += [partial(lanes.move, half, t) for t in lanes.movable(half)]
        done = sorted(half.sending.keys() - half.unread)
        possible += [partial(lanes.sent, half, descriptor) for descriptor in done]
    return possible
