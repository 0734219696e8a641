"""Data beside the control link: which transport carries it, and what if it breaks.

The lanes are those of inproc beside a link over tcp, so everything between them and the
application is real.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial

import pytest

from kvwire import ConnectionLost
from kvwire.backend import Landing, Link, Payload
from kvwire.driver.lanes.active_transport import LOG_DELAY_S
from kvwire.errors import ConnectionClosed
from kvwire.limits import KIB, MIB, SPAN_BYTES_MAX
from kvwire_inproc.lane import InprocLane
from tests.support import inside
from tests.support.lanes import (
    BESIDE,
    CHUNK,
    DATA,
    NEVER_S,
    ONLY,
    expect_moves,
    is_over,
    lane_pause,
    use,
)
from tests.support.logs import warned
from tests.support.pairs import connected, until

# What breaks is opened again when its test is over.
_stays_down = lane_pause(NEVER_S, autouse=True)


class Wide(InprocLane):
    """A lane that takes as much at once as any, and little of what is short."""

    span_bytes = SPAN_BYTES_MAX
    bytes_min = 128 * KIB


def break_after(
    monkeypatch: pytest.MonkeyPatch, count: int, span: int = InprocLane.span_bytes
) -> None:
    """Let each side's lane break once so many payloads have arrived there."""

    class Breaking(InprocLane):
        received = 0
        span_bytes = span

        def body_received(self, link: Link, landing: Landing) -> None:
            super().body_received(link, landing)
            self.received += 1
            if self.received == count:
                self.abort(ConnectionLost("planted"))

    use(monkeypatch, Breaking, "both")


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_spans_are_sent_again_as_chunks(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane takes 8 MiB at once, the control link chunk by chunk."""
    break_after(monkeypatch, after, SPAN_BYTES_MAX)
    async with connected(**BESIDE) as pair:
        await expect_moves(pair)
        if after:
            await until(partial(is_over, pair.left, "tcp"))


@pytest.mark.parametrize("nbytes", [CHUNK + KIB, SPAN_BYTES_MAX + CHUNK + KIB])
async def test_what_is_longer_than_a_chunk_and_too_short_for_a_lane(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes by the control link, whose frames are chunks; the memory is longer."""
    use(monkeypatch, Wide, "both")
    async with connected(**BESIDE) as pair:
        memory = bytearray(os.urandom(nbytes + MIB))
        region = pair.far.register(memory, "read")
        into = bytearray(nbytes)
        await pair.left.get(region.grant(pair.right, nbytes=nbytes), into=into)
        assert into == memory[:nbytes]
        await region.close()


async def test_a_required_lane_that_breaks_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else may carry the data, and nothing else does."""
    break_after(monkeypatch, 2)
    async with connected(**ONLY) as pair:
        region = pair.far.register(bytearray(len(DATA)), "readwrite")
        put = pair.left.put(DATA, region.grant(pair.right))
        with pytest.raises(ConnectionLost):
            await put
        await put.released()
        with pytest.raises(ConnectionClosed):
            await pair.left.recv(7)
        await region.close()
        assert not len(inside.buffers(pair.near).holds)


async def test_the_log_has_a_line_for_each_life(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "kvwire.lanes")
    async with connected(**BESIDE) as pair:
        await expect_moves(pair)
    said = [r.getMessage() for r in caplog.records]
    assert len([text for text in said if "lane 1 is open: inproc" in text]) == 2
    ended = [text for text in said if "lane 1 has ended: inproc, " in text]
    assert len(ended) == 2, said
    assert all("the connection ended" in text for text in ended)


async def test_the_end_of_a_connection_is_no_broken_lane(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Though the end of the lane is often seen first, nobody is warned about it."""
    for _ in range(10):
        async with connected(**BESIDE) as pair:
            await expect_moves(pair)
            pair.left.abort("enough")
            for end in (pair.left, pair.right):
                await end.wait_closed()
                assert not inside.driver(end).active.pending
    await asyncio.sleep(2 * LOG_DELAY_S)  # what is said is said a moment later
    assert not warned(caplog)


class _EndsWhileItSends(InprocLane):
    """Like a lane whose end has been seen, and not been told yet."""

    def send(self, payload: Payload, token: object) -> bytes:
        self.abort()
        return super().send(payload, token)


async def test_a_lane_that_has_ended_and_not_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its empty descriptor costs the lane and not the connection."""
    use(monkeypatch, _EndsWhileItSends, "client")
    async with connected(**BESIDE) as pair:
        await expect_moves(pair)
        assert not pair.left.closed
        assert pair.left.transport == pair.right.transport == "tcp"


class _Forging(InprocLane):
    def send(self, payload: Payload, token: object) -> bytes:
        super().send(payload, token)
        return b"not a descriptor"


@pytest.mark.rule("KVW-LN-07", "breaks")
async def test_a_descriptor_that_no_lane_makes_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, _Forging, "client")
    async with connected(**BESIDE) as pair:
        region = pair.far.register(bytearray(len(DATA)), "readwrite")
        with pytest.raises(ConnectionLost):
            await pair.left.put(DATA, region.grant(pair.right))
        await until(lambda: pair.right.closed)
        await region.close()
    assert "KVW-LN-07" in caplog.text


@pytest.mark.rule("KVW-LN-07", "keeps")
async def test_descriptors_of_the_peer_s_lane_are_understood() -> None:
    async with connected(**ONLY) as pair:
        await expect_moves(pair)
        assert not pair.right.closed
