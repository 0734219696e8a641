"""KV transfers of a pair, for tests, and what tests of a pair ask again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvwire.errors import KVWireError
from kvwire.proto.events import TransferOpened
from kvwire.proto.records import RequestRecord, SegmentRecord
from kvwire.types import BufferId, TrustMode
from kvwire.wire.header import FrameType, decode_header
from tests.support.core_pair.handshakes import identity
from tests.support.core_pair.peer import ConnectionPair, Peer
from tests.support.splitter import Frame


def expect_broken(pair: ConnectionPair, peer: Peer, rule: str) -> None:
    """After all frames, ``peer`` has found that rule broken, and everything is over."""
    pair.run()
    assert peer.broken is not None, f"{rule}: nothing was refused"
    assert peer.broken.rule == rule, peer.broken
    for end in (pair.client, pair.server):
        assert end.ended is not None
        assert end.lost
        assert all(request.over for request in end.done)


def expect_fine(pair: ConnectionPair) -> None:
    """After all frames, nobody has found any rule broken."""
    pair.run()
    for end in (pair.client, pair.server):
        assert end.broken is None, end.broken


def expect_error(
    peer: Peer, request: RequestRecord | None, kind: type[KVWireError]
) -> None:
    """A request is over, with an error of exactly this class."""
    assert request is not None
    assert type(peer.error(request)) is kind, peer.error(request)


def on_the_wire(peer: Peer) -> list[Frame]:
    """The frames that are on their way from one end."""
    return [Frame(decode_header(header), header, body) for header, body in peer.wire]


CHUNK = 65_536

both_ways = pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])


@dataclass
class Moved:
    """A transfer of a pair, with the memory of both sides."""

    pair: ConnectionPair
    pull: bool = False
    asker: RequestRecord = field(init=False)
    answerer: RequestRecord = field(init=False)
    sources: list[BufferId] = field(default_factory=list)
    targets: dict[int, BufferId] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asker = self.pair.client.open(pull=self.pull)
        self.pair.run()
        (opened,) = self.pair.server.heard(TransferOpened)
        assert (opened.id, opened.description) == (b"name", b"what I have")
        self.answerer = opened.request

        def place(segment: SegmentRecord) -> None:
            buffer = self.consumer.lend(segment.nbytes)
            self.targets[segment.number] = buffer
            self.consumer.core.transfers.place(segment, buffer)

        self.consumer.place = place

    @property
    def producer(self) -> Peer:
        return self.pair.server if self.pull else self.pair.client

    @property
    def consumer(self) -> Peer:
        return self.pair.client if self.pull else self.pair.server

    @property
    def outgoing(self) -> RequestRecord:
        return self.answerer if self.pull else self.asker

    @property
    def incoming(self) -> RequestRecord:
        return self.asker if self.pull else self.answerer

    @property
    def names(self) -> list[str]:
        """What is on its way from the producer and then from the consumer."""
        frames = [*on_the_wire(self.producer), *on_the_wire(self.consumer)]
        return [FrameType(frame.header.type).name for frame in frames]

    def over(self) -> bool:
        """Whether the consumer knows that the producer knows."""
        return self.incoming in self.consumer.done

    def agree(self) -> Moved:
        self.pair.server.agree()
        self.pair.run()
        return self

    def mark(self, data: bytes, commit: int = 0) -> SegmentRecord:
        segment = self.producer.mark(self.outgoing, data, commit)
        assert segment.buffer is not None
        self.sources.append(segment.buffer)
        return segment

    def commit(self, *, complete: bool = True) -> None:
        self.producer.commit(self.outgoing, complete=complete)

    def content(self, number: int) -> bytes:
        return self.consumer.content(self.targets[number])


def moved(
    *,
    pull: bool = False,
    trust: TrustMode = TrustMode.LOOPBACK,
    in_order: bool = True,
) -> Moved:
    """A transfer that both sides have agreed on.

    Without ``in_order`` each mark has a frame of its own.
    """
    client, server = (identity(name, trust=trust) for name in ("client", "server"))
    m = Moved(ConnectionPair(client=client, server=server), pull).agree()
    m.producer.core.transfers.records[m.outgoing].in_order = in_order
    return m
