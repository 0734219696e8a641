"""What the driver hands to a link, when it stops, and what its mistakes end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvwire import ConnectionLost
from kvwire.driver.unreceived_log import Seen, overdue
from kvwire.limits import (
    CHUNK_BYTES,
    CHUNK_BYTES_MAX,
    CONTROL_QUEUE_BYTES_MAX,
    HEADER_BYTES,
    LINK_QUEUE_BYTES,
    WAITING_LOG_S,
    WAKEUP_BYTES,
)
from kvwire.proto.events import RequestDone, TransferAgreed
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import RequestKind, RequestStage
from tests.support import inside
from tests.support.caches import BLOCKS, LAYERS, Memory, same
from tests.support.pairs import Pair, connected, turns, until

LARGE = bytes(16 << 20)
_CONFIG: dict[str, Any] = {"window_bytes": 64 << 20, "window_messages": 1 << 20}


class FakeRoom:
    """A link that loses all chunks, and whose queue is as full as the test says.

    Attributes:
        sent: Payload bytes of each chunk.
    """

    def __init__(self, pair: Pair, stuck_bytes: int) -> None:
        self._link = inside.driver(pair.left).link
        self.queued_bytes = self.stuck_bytes = stuck_bytes
        self.sent: list[int] = []
        inside.driver(pair.left).link = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(
        self, header: bytes, payload: memoryview | None = None, token: Any = None
    ) -> None:
        if token is None:
            self._link.send(header, payload)
        elif payload is not None:
            self.sent.append(payload.nbytes)
            self.queued_bytes += payload.nbytes

    def flush(self) -> None:
        self._link.flush()
        self.queued_bytes = self.stuck_bytes


class CountedLink:
    """A link that counts the payload bytes handed to it."""

    def __init__(self, pair: Pair) -> None:
        self._link = inside.driver(pair.left).link
        self.sent_bytes = 0
        inside.driver(pair.left).link = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, header: bytes, payload: Any = None, token: Any = None) -> None:
        if token is not None:
            self.sent_bytes += payload.nbytes
        self._link.send(header, payload, token)


def _nothing_new() -> TransferAgreed:
    """An event of which nobody knows what to do."""
    nobody = RequestRecord(
        kind=RequestKind.INCOMING, buffer=None, nbytes=0, state=RequestStage.POSTED
    )
    return TransferAgreed(request=nobody, description=b"")


async def moving(pair: Pair) -> None:
    """Begin a large message, and wait until chunks of it may leave."""
    pair.left.send(1, LARGE)
    pair.right.recv(1, bytearray(len(LARGE)))
    await until(lambda: inside.core(pair.left).sending)


async def test_a_wake_up_is_spent_and_the_rest_comes_in_the_next() -> None:
    async with connected() as pair:
        link = FakeRoom(pair, 0)
        await moving(pair)
        assert sum(link.sent) - len(LARGE) < 0
        before = sum(link.sent)
        await asyncio.sleep(0)
        assert 0 < sum(link.sent) - before <= WAKEUP_BYTES + LINK_QUEUE_BYTES
        pair.left.abort()


async def test_a_landed_layer_wakes_its_waiter_before_queued_payload_is_sent() -> None:
    """However much this side has to send, and however much the link would take."""
    source, target = Memory(), Memory()
    landed: list[int] = []

    def spy(*told: Any) -> None:
        landed.append(link.sent_bytes)
        take(*told)

    async with connected(prefer=("tcp",), checksum="off") as pair:
        link = CountedLink(pair)
        out = pair.far.publish("one", source.cache, [0])
        inc = pair.left.pull("one", target.cache, [0])
        await until(lambda: inc.met)
        (record,) = inside.core(pair.left).transfers.records.values()
        take: Any = record.take
        record.take = spy
        for _ in range(8):
            await moving(pair)
        for layer in range(LAYERS):
            out.ready(layers=layer)
            await inc.layer(layer)
            assert landed.pop() == link.sent_bytes
            assert inside.core(pair.left).sending
        assert not landed
        assert link.sent_bytes > WAKEUP_BYTES, "payload was sent all the while"
        pair.left.abort()


@pytest.mark.parametrize("room", [None, 0, HEADER_BYTES + 10])
@pytest.mark.parametrize("blocks", [[0], list(range(BLOCKS))[::-1]])
async def test_a_layer_is_lent_only_if_the_link_does_not_take_all_of_it(
    room: int | None, blocks: list[int]
) -> None:
    source, target = Memory(), Memory()
    async with connected(prefer=("tcp",)) as pair:
        out = pair.far.publish("one", source.cache, blocks)
        inc = pair.left.pull("one", target.cache, blocks)
        await until(lambda: inc.met)
        link: Any = inside.driver(pair.right).link
        lent = inside.buffers(pair.far)
        if room is not None:
            limited(link, room)
        out.ready(layers=0)
        await until(lambda: inside.under_way(out))
        assert len(lent) == (room is not None)
        assert bool(link.queued_bytes) == (room is not None)
        await inc.layer(0)
        out.ready(layers=slice(1, None))
        out.finish()
        assert (await inc).complete
        assert (await out).complete
        await out.drained()
        assert len(lent) == 0
        assert same(source, blocks, target, blocks)


def limited(link: Any, room: int) -> None:
    """Let the kernel take only so many bytes of the link's next frame."""
    wire = link._wire
    calls = wire.send, wire.sendmsg

    def once(data: Any) -> int:
        wire.send, wire.sendmsg = calls
        if not room:
            raise BlockingIOError
        frame = data if type(data) is bytes else b"".join(data)
        return int(wire.send(frame[:room]))

    wire.send = wire.sendmsg = once


@pytest.mark.parametrize("nbytes", [100_000, len(LARGE)])
async def test_only_much_payload_waits_behind_those_whom_an_event_has_woken(
    nbytes: int,
) -> None:
    """A turn of the loop of its own for a little would double its time."""
    async with connected() as pair:
        link = FakeRoom(pair, LINK_QUEUE_BYTES)
        pair.left.send(1, LARGE[:nbytes])
        pair.right.recv(1, bytearray(nbytes))
        await until(lambda: inside.core(pair.left).sending)
        link.queued_bytes = link.stuck_bytes = 0
        inside.core(pair.left).outbox.report(_nothing_new())
        inside.run(pair.left)
        assert sum(link.sent) == (nbytes if nbytes < len(LARGE) else 0)
        await until(lambda: sum(link.sent) == nbytes)
        pair.left.abort()


async def test_events_in_every_turn_do_not_keep_payload_from_being_sent() -> None:
    event = _nothing_new()
    async with connected() as pair:
        link = FakeRoom(pair, 0)
        await moving(pair)
        before, loop = sum(link.sent), asyncio.get_running_loop()

        def step() -> None:
            """Be ahead of the payload, which queues up behind what an event wakes."""
            if sum(link.sent) == before:
                loop.call_soon(step)
            inside.core(pair.left).outbox.report(event)
            inside.run(pair.left)

        step()
        await turns(100)
        assert sum(link.sent) > before
        pair.left.abort()


async def test_the_end_stops_a_driver_with_chunks_left_and_room_for_them() -> None:
    """It once span for ever: chunks were left, and the ended core gave none."""
    async with connected() as pair:
        FakeRoom(pair, 0)
        await moving(pair)
        pair.left.abort()
        assert pair.left.closed
        assert not inside.core(pair.left).sending


async def test_no_chunk_goes_to_a_full_link() -> None:
    async with connected() as pair:
        link = FakeRoom(pair, LINK_QUEUE_BYTES)
        await moving(pair)
        assert sum(link.sent) == 0
        link.queued_bytes = link.stuck_bytes = 0
        inside.driver(pair.left).link_writable(link)  # type: ignore[arg-type]
        assert sum(link.sent) > 0
        pair.left.abort()


async def test_small_messages_are_announced_while_the_link_is_full() -> None:
    """However wide the peer's window is, what waits here stays small."""
    async with connected(**_CONFIG) as pair:
        FakeRoom(pair, LINK_QUEUE_BYTES)
        request = pair.left.send(1, b"small")
        assert not request.done()
        pair.left.abort()
        with pytest.raises(ConnectionLost):
            await request


async def test_a_burst_of_small_messages_arrives_in_order() -> None:
    """64 MiB of them in one go, from a caller that does not wait."""
    async with connected(**_CONFIG) as pair:
        body = bytes(16 << 10)
        count = (LINK_QUEUE_BYTES + CONTROL_QUEUE_BYTES_MAX) // len(body) + 512
        sent = [
            pair.left.send(1, number.to_bytes(8, "little") + body[8:])
            for number in range(count)
        ]
        for number in range(count):
            message = await pair.right.recv(1)
            assert int.from_bytes(message[:8], "little") == number
        assert await asyncio.gather(*sent) == [len(body)] * count


async def test_messages_sent_from_within_an_event_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large one is announced by a frame that waits; the small one is behind it."""
    async with connected() as pair:
        driver, sent = inside.driver(pair.left), []
        on_done = driver._acts[RequestDone]

        def send_two(event: RequestDone) -> None:
            monkeypatch.undo()
            on_done(event)
            sent.extend([pair.left.send(1, LARGE), pair.left.send(1, b"small")])

        monkeypatch.setitem(driver._acts, RequestDone, send_two)
        waiting = pair.left.recv(2)
        waiting.cancel()
        assert await pair.right.recv(1, bytearray(len(LARGE))) == len(LARGE)
        assert await pair.right.recv(1) == b"small"
        assert len(await asyncio.gather(*sent)) == 2


async def test_a_peer_that_does_not_read_is_given_up() -> None:
    async with connected() as pair:
        payload_bytes = LINK_QUEUE_BYTES + CHUNK_BYTES
        FakeRoom(pair, payload_bytes + CONTROL_QUEUE_BYTES_MAX + HEADER_BYTES)
        request = pair.left.send(1, LARGE)
        with pytest.raises(ConnectionLost, match="does not read"):
            await request
        await pair.left.wait_closed()
        await request.released()


async def test_the_largest_chunk_is_not_taken_for_a_slow_peer() -> None:
    """One that is queued whole, although there was room for a byte of it only."""
    async with connected(chunk_bytes=CHUNK_BYTES_MAX) as pair:
        got = pair.right.recv(1, bytearray(2 * len(LARGE)))
        assert await pair.left.send(1, 2 * LARGE) == 2 * len(LARGE)
        assert await got == 2 * len(LARGE)


@pytest.mark.parametrize("where", ["tick", "next_chunk"])
async def test_a_bug_ends_its_own_connection_only(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a timer and in a turn of its own nobody else would catch it."""
    async with connected(ping_interval_s=0.2) as pair:
        other = await pair.near.connect(pair.address)
        FakeRoom(pair, 0)
        await moving(pair)

        def bug(*_: Any) -> None:
            raise ZeroDivisionError("planted")

        monkeypatch.setattr(inside.core(pair.left), where, bug)
        await pair.left.wait_closed()
        assert pair.left.closed
        assert "a bug of kvwire" in caplog.text
        await other.send(1, b"alive")
        other_end = await anext(pair.far.connections())
        assert await other_end.recv(1) == b"alive"


async def test_a_bug_in_one_event_loses_none_of_those_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them is the only word on a request, or on memory."""
    async with connected() as pair:
        first, second = (pair.left.recv(tag) for tag in (1, 2))
        acts = inside.driver(pair.left)._acts
        done = acts[RequestDone]
        seen: list[RequestDone] = []

        def one_fails(event: RequestDone) -> None:
            seen.append(event)
            if len(seen) == 1:
                raise ZeroDivisionError
            done(event)

        monkeypatch.setitem(acts, RequestDone, one_fails)
        with pytest.raises(ZeroDivisionError):
            pair.left.abort("on purpose")
        with pytest.raises(ConnectionLost, match="on purpose"):
            await second
        assert len(seen) == 2
        assert not first.done()
        await pair.left.wait_closed()
        assert pair.left not in pair.near.live_connections


# --- A tag is named once, when the same message has been its oldest for long ----------


def test_who_is_named_and_when() -> None:
    first, second = object(), object()
    seen: Seen = {}
    assert overdue(seen, {1: first, 2: first}, 100.0) == []
    late = 100.0 + WAITING_LOG_S
    # The first message of tag 2 was received meanwhile.
    assert overdue(seen, {1: first, 2: second}, late) == [1]
    assert overdue(seen, {1: first, 2: second}, late + 1) == []
    assert overdue(seen, {2: second}, late + WAITING_LOG_S) == [2]
    assert overdue(seen, {1: first}, late + WAITING_LOG_S) == []
    assert overdue(seen, {1: first}, late + 2 * WAITING_LOG_S) == [1]
