"""What a link promises while it lives: order, whole frames, memory, back-pressure."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kvwire.backend import Landing, Link
from kvwire.errors import ConnectionLost, UsageError
from kvwire.limits import EAGER_BYTES_MAX, HEADER_BYTES, KIB, MIB, WAKEUP_BYTES
from kvwire_tcp.duplex import CALLS_PER_WAKEUP
from kvwire_tcp.reader import SCRATCH_BYTES
from kvwire_tcp.writer import JOINED_BYTES_MAX, VIEWS_MAX
from tests.backends.kvwire_tcp.recorder import (
    DROP,
    PIECES,
    VIEW,
    Body,
    Pair,
    Recorder,
    against_a_socket,
    gathered,
    header,
    linked,
    pieces_of,
)

# More than the kernel holds on both sides of loopback, so that some must wait.
MORE_THAN_FITS = 24 * MIB
LENGTHS = sorted(
    {
        0,
        1,
        JOINED_BYTES_MAX,
        JOINED_BYTES_MAX + 1,
        SCRATCH_BYTES - HEADER_BYTES,
        SCRATCH_BYTES - HEADER_BYTES + 1,
        SCRATCH_BYTES,
        SCRATCH_BYTES + 1,
        EAGER_BYTES_MAX,
        MIB + 5,
    }
)


async def test_frames_of_every_kind_arrive_whole_once_and_in_order() -> None:
    async with linked() as pair:
        expected: list[tuple[int, bytes | None]] = []
        for length in LENGTHS:
            for kind in (VIEW, PIECES, DROP):
                body, number = os.urandom(length), len(expected)
                expected.append((number, None if kind == DROP else body))
                pair.near.send(header(length, number, kind), memoryview(body), number)
        pair.near.flush()
        await pair.at_far.received(len(expected))
        await pair.at_near.until(lambda: len(pair.at_near.sent) == len(expected))
        assert pair.at_far.frames == expected
        assert pair.at_near.sent == list(range(len(expected)))
        assert pair.near.queued_bytes == 0
        sizes = len(expected) * HEADER_BYTES + 3 * sum(LENGTHS)
        assert pair.far.received_bytes == sizes


@pytest.mark.parametrize("length", [0, 1, 6, 7, 4 * KIB, 300 * KIB])
@pytest.mark.parametrize("kind", [VIEW, PIECES, DROP])
async def test_fragments_are_gathered_in_their_order(length: int, kind: int) -> None:
    async with linked() as pair:
        arena = bytearray(os.urandom(2 * length + 1))
        fragments = pieces_of(arena, length)
        body = gathered(arena, length)
        for token in range(3):
            pair.near.send(header(length, token, kind), fragments, token)
        pair.near.flush()
        await pair.at_far.received(3)
        received = None if kind == DROP else body
        assert pair.at_far.frames == [(token, received) for token in range(3)]


async def test_more_frames_than_one_system_call_takes() -> None:
    async with linked() as pair:
        count = 3 * VIEWS_MAX
        for number in range(count):
            pair.near.send(header(0, number))
        pair.near.flush()
        await pair.at_far.received(count)
        assert [number for number, _ in pair.at_far.frames] == list(range(count))


async def test_both_directions_at_once() -> None:
    async with linked() as pair:
        body = memoryview(os.urandom(MIB))
        for number in range(8):
            pair.near.send(header(MIB, number), body, number)
            pair.far.send(header(MIB, number), body, number)
            pair.near.flush()
            pair.far.flush()
        for recorder in (pair.at_near, pair.at_far):
            await recorder.received(8)
            assert recorder.frames == [(n, bytes(body)) for n in range(8)]


async def test_nothing_moves_before_flush() -> None:
    async with linked() as pair:
        with pair.at_near.calling("send"):
            pair.near.send(header(5), memoryview(b"12345"), "token")
        assert pair.near.queued_bytes == HEADER_BYTES + 5
        assert pair.at_near.sent == []
        pair.near.flush()
        assert pair.near.queued_bytes == 0
        assert pair.at_near.sent == ["token"]


async def test_what_does_not_fit_waits_and_is_told_when_it_is_gone() -> None:
    async with linked() as pair:
        body = memoryview(bytearray(MORE_THAN_FITS))
        pair.near.send(header(len(body), 1, DROP), body, "bulk")
        pair.near.flush()
        assert 0 < pair.near.queued_bytes < HEADER_BYTES + len(body)
        assert pair.at_near.sent == []
        await pair.at_near.until(lambda: pair.at_near.writable)
        assert pair.at_near.sent == ["bulk"]
        assert pair.at_near.writable == 1
        await pair.at_far.until(lambda: pair.at_far.frames)


async def test_a_flush_that_leaves_nothing_is_not_followed_by_link_writable() -> None:
    async with linked() as pair:
        pair.near.send(header(0, 1))
        pair.near.flush()
        await pair.at_far.until(lambda: pair.at_far.frames)
        await echoed(pair)
        assert pair.at_near.writable == 0


async def test_a_wakeup_delivers_a_share_of_a_burst_of_small_frames() -> None:
    async with against_a_socket() as (link, recorder, peer):
        link._loop.remove_reader(link._sock)
        share = CALLS_PER_WAKEUP * SCRATCH_BYTES // HEADER_BYTES
        peer.sendall(header(0) * (share + 9))
        link._on_readable()
        assert len(recorder.frames) == share
        link._on_readable()
        assert len(recorder.frames) == share + 9


async def test_one_flush_moves_no_more_than_a_wakeup_may() -> None:
    async with linked() as pair:
        pair.near.send(header(MORE_THAN_FITS), memoryview(bytes(MORE_THAN_FITS)), 1)
        queued = pair.near.queued_bytes
        pair.near.flush()
        # The last call of the budget may carry one more budget.
        assert queued - pair.near.queued_bytes <= 2 * WAKEUP_BYTES


@pytest.mark.parametrize("as_pieces", [False, True])
@pytest.mark.parametrize("full", [False, True])
async def test_memory_without_token_is_free_after_flush(
    as_pieces: bool, full: bool
) -> None:
    async with linked() as pair:
        bulk = memoryview(bytes(MORE_THAN_FITS if full else 0))
        pair.near.send(header(len(bulk), 0, DROP), bulk, "bulk")
        length = EAGER_BYTES_MAX
        for number in (1, 2):
            arena = bytearray(os.urandom(2 * length))
            if as_pieces:
                expected = gathered(arena, length)
                pair.near.send(header(length, number), pieces_of(arena, length))
            else:
                expected = bytes(arena[:length])
                pair.near.send(header(length, number), memoryview(arena)[:length])
            pair.near.flush()
            arena[:] = bytes(len(arena))
            arena.clear()  # refused while there is a view of it
            await pair.at_far.received(number + 1)
            assert dict(pair.at_far.frames)[number] == expected


async def test_a_callback_may_send_and_flush() -> None:
    class Chatty(Recorder):
        def frame_sent(self, link: Link, token: object) -> None:
            super().frame_sent(link, token)
            if isinstance(token, int) and token < 1000:
                link.send(header(3, token + 1), memoryview(b"abc"), token + 1)
                link.flush()

    async with linked(start=False) as pair:
        chatty, far = Chatty(), Recorder()
        pair.near.start(chatty)
        pair.far.start(far)
        pair.near.send(header(3, 0), memoryview(b"abc"), 0)
        pair.near.flush()
        await far.received(1001)
        assert chatty.sent == list(range(1001))
        pair.near.abort()
        await chatty.end()
        await far.end()


async def test_memory_is_let_go_as_soon_as_it_is_given_back() -> None:
    class Freeing(Recorder):
        def body_received(self, link: Link, landing: Landing) -> None:
            super().body_received(link, landing)
            assert isinstance(landing, Body)
            landing.payload = None
            landing.arena.clear()  # refused while there is a view of it

        def frame_sent(self, link: Link, token: object) -> None:
            super().frame_sent(link, token)
            assert isinstance(token, bytearray)
            token.clear()

    async with linked(start=False) as pair:
        near, far = Freeing(), Freeing()
        pair.near.start(near)
        pair.far.start(far)
        for number, length in enumerate((10, SCRATCH_BYTES, MIB, 8 * MIB)):
            source = bytearray(length)
            pair.near.send(header(length, number), memoryview(source), source)
            pair.near.flush()
        await near.until(lambda: len(near.sent) == 4)
        await far.received(4)
        pair.near.abort()
        assert isinstance(await near.end(), ConnectionLost)
        assert isinstance(await far.end(), ConnectionLost)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda landing: setattr(landing, "payload", memoryview(bytearray(3))),
        lambda landing: setattr(landing, "payload", memoryview(bytes(landing.length))),
        lambda landing: setattr(landing, "payload", landing.payload.cast("b")),
    ],
    ids=["other length", "read-only", "other format"],
)
@pytest.mark.parametrize("length", [64, MIB])
async def test_a_wrong_destination_is_refused_before_a_byte_is_written(
    spoil: Callable[[Landing], None], length: int
) -> None:
    async with linked() as pair:
        take = pair.at_far.header_received

        def wrong(link: Link, header: memoryview) -> Landing:
            landing = take(link, header)
            spoil(landing)
            return landing

        pair.at_far.header_received = wrong  # type: ignore[method-assign]
        pair.near.send(header(length), memoryview(bytes(length)), 1)
        pair.near.flush()
        error = await pair.at_far.end()
        assert isinstance(error, UsageError | ValueError | TypeError)
        assert pair.at_far.frames == []


async def test_read_only_fragments_are_refused_as_a_destination() -> None:
    async with linked() as pair:
        take = pair.at_far.header_received

        def wrong(link: Link, header: memoryview) -> Landing:
            landing = take(link, header)
            assert landing.payload is not None
            landing.payload.writable = False  # type: ignore[union-attr]
            return landing

        pair.at_far.header_received = wrong  # type: ignore[method-assign]
        pair.near.send(header(MIB, 0, PIECES), memoryview(bytes(MIB)), 1)
        pair.near.flush()
        assert isinstance(await pair.at_far.end(), UsageError)


async def test_addresses_lead_to_each_other() -> None:
    async with linked() as pair:
        assert pair.near.remote_address is not None
        assert pair.near._sock.getsockname() == pair.far._sock.getpeername()
        assert pair.far.remote_address is not None
        assert pair.far.remote_address.port == pair.near._sock.getsockname()[1]
        assert pair.near.received_bytes == 0


async def echoed(pair: Pair) -> None:
    """Return when the near side has had every wake-up it is due."""
    pair.far.send(header(0, 77))
    pair.far.flush()
    await pair.at_near.until(lambda: 77 in dict(pair.at_near.frames))
