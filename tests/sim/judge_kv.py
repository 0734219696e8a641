"""Whether what the core says about KV transfers is true."""

from __future__ import annotations

from kvwire.proto.chunks import ChunkArrival
from kvwire.proto.records import SegmentRecord
from kvwire.proto.state import RequestKind
from tests.sim.ask import Ask, Part
from tests.sim.content import content
from tests.sim.violation import demand


class KVJudge:
    """Compares what a consumer has with what its producer has marked."""

    def serial_of(self, ask: Ask, segment: SegmentRecord) -> int:
        """The content of a segment that its producer has marked."""
        part = _other(ask).parts.get(segment.number)
        demand(part, "kv", "a segment that was never marked")
        assert part is not None
        demand(part.nbytes == segment.nbytes, "kv", "a segment of another size")
        return part.serial

    def lands(self, arrival: ChunkArrival) -> None:
        """A chunk is about to be written: there, and may it be?"""
        segment = arrival.segment
        assert segment is not None
        ask, part = _consumer(segment)
        demand(not ask.over, "completion", "a transfer takes bytes after its end")
        demand(not part.landed, "kv", "a segment takes bytes after it has landed")
        demand(arrival.buffer == part.buffer, "place", "a chunk for another buffer")
        demand(
            arrival.offset == arrival.header.offset, "place", "a chunk beside its place"
        )

    def landed(self, arrival: ChunkArrival, data: bytes) -> None:
        """A chunk is in place: is it what its producer meant?"""
        segment = arrival.segment
        assert segment is not None
        _, part = _consumer(segment)
        begin = arrival.header.offset
        right = content(part.serial, part.nbytes)[begin : begin + len(data)]
        demand(data == right, "content", "a chunk has other bytes than were marked")
        part.covered += len(data)

    def segment_landed(self, ask: Ask, segment: SegmentRecord) -> None:
        """The core says that a segment is all here."""
        part = ask.parts[segment.number]
        part.landed = True
        if segment.damaged:
            damaged = ask.endpoint.end.into.damaged
            demand(damaged, "untrue", "damage that never was")
            return
        demand(part.covered == part.nbytes, "completion", "a segment with holes landed")
        assert part.lease is not None
        data = ask.endpoint.node.memory.load(part.lease, 0, part.nbytes)
        right = content(part.serial, part.nbytes)
        demand(data == right, "content", "a segment has other bytes than were marked")

    def acknowledged(self, ask: Ask, numbers: tuple[int, ...]) -> None:
        """The core says that the consumer has these segments."""
        consumer = _other(ask)
        for number in numbers:
            part = consumer.parts.get(number)
            demand(part and part.landed, "kv", "acknowledged, and has not landed")
            assert part is not None
            demand(part.covered == part.nbytes, "kv", "acknowledged, and is damaged")

    def settled(self, ask: Ask) -> None:
        """The core says that the consumer has all it will get."""
        producer = _other(ask)
        demand(producer.committed, "kv", "settled before the commit")
        demand(len(producer.parts) == len(ask.parts), "kv", "settled with a gap")
        demand(
            all(part.landed for part in ask.parts.values()),
            "completion",
            "settled before everything has landed",
        )

    def succeeded(self, ask: Ask) -> None:
        """A transfer has ended well, on either side."""
        producer, consumer = ask, _other(ask)
        if ask.kind is RequestKind.INCOMING:
            producer, consumer = consumer, producer
        demand(producer.committed, "kv", "a transfer ends well without a commit")
        demand(
            len(producer.parts) == len(consumer.parts)
            and all(part.landed for part in consumer.parts.values()),
            "completion",
            "a transfer ends well before everything has landed",
        )
        damaged = [
            number
            for number, part in consumer.parts.items()
            if part.covered < part.nbytes
        ]
        said = ask.endpoint.core.transfers.transfer(ask.core).damaged
        demand(
            sorted(said) == damaged, "untrue", "damage that both sides see otherwise"
        )


def _consumer(segment: SegmentRecord) -> tuple[Ask, Part]:
    ask = segment.request.context
    assert isinstance(ask, Ask)
    return ask, ask.parts[segment.number]


def _other(ask: Ask) -> Ask:
    """The same transfer at the other side."""
    peer = ask.endpoint.peer
    other = None
    if peer is not None and ask.core.wire_id is not None:
        other = peer.asks.get(ask.core.wire_id)
    demand(other, "kv", "a transfer that the other side does not know")
    assert other is not None
    return other
