"""How windows end, and what a get that is given up leaves behind."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire.backend import WindowReader
from kvwire.endpoint.windows.opened import PeerWindows
from kvwire.limits import MIB, WINDOW_GET_BYTES_MAX
from kvwire_certify.oracle import content
from tests.backends.kvwire_ucx.support import SHARED_MEMORY, needs_reading
from tests.support import inside
from tests.support.caches import Filled
from tests.support.pairs import Pair, connected, turns, until
from tests.support.waiting import PATIENCE_S

UCX: dict[str, Any] = {
    "prefer": ("ucx",),
    "one_sided_windows": "peers",
    "backends": {"ucx": {"TLS": SHARED_MEMORY}},
}


def is_busy(reader: WindowReader) -> bool:
    """Whether it may touch memory."""
    return reader.busy


async def test_a_cancelled_get_is_forgotten_by_the_owner() -> None:
    """Nothing of it is left, however often that happens."""
    memory = bytearray(content(64 * MIB))
    async with connected("tcp") as pair:
        window = pair.far.expose("bytes", memory, block_bytes=MIB)
        remote = await pair.left.window("bytes")
        for _ in range(3):
            request = remote.get(window.offer(range(64)), into=bytearray(64 * MIB))
            await until(lambda: inside.served_reads(pair.right))
            request.cancel()
            await request.released()
            await until(lambda: not inside.buffers(pair.far))
        assert not inside.served_reads(pair.right)
        await window.close()


@pytest.mark.parametrize("transport", ["tcp", "local"])
@pytest.mark.parametrize("nbytes", [4096, 128 * 1024, 32 * MIB])
async def test_nobody_awaits_a_get(transport: str, nbytes: int) -> None:
    """Its memory is not released before it is over: in one frame, chunks or turns."""
    memory = bytearray(content(nbytes))
    async with connected("tcp", prefer=(transport,)) as pair:
        window = pair.far.expose("bytes", memory, block_bytes=4096)
        remote = await pair.left.window("bytes")
        into = bytearray(nbytes)
        request = remote.get(window.offer(range(nbytes // 4096)), into=into)
        await request.released()
        assert request.done()
        assert into == memory


async def test_reads_of_one_frame_of_which_one_is_stale() -> None:
    """The others land: nothing was wrong with them."""
    source = Filled(seed=1)
    target = Filled()
    cache = target.cache
    async with connected("tcp") as pair:
        window = pair.far.expose("kv", source.cache)
        remote = await pair.left.window("kv")
        tickets = [window.offer([n]) for n in range(4)]
        window.withdraw([2])
        outcomes = await asyncio.gather(
            *(
                remote.get(ticket, into=cache, blocks=[n])
                for n, ticket in enumerate(tickets)
            )
        )
        assert [one.complete for one in outcomes] == [True, True, False, True]
        for n in (0, 1, 3):
            assert (target.tokens([n]) == source.tokens([n])).all()


async def test_a_block_larger_than_the_usual_get() -> None:
    """It is asked for by itself, and the connection lives."""
    nbytes = WINDOW_GET_BYTES_MAX + MIB
    memory = bytearray(content(nbytes))
    async with connected("tcp") as pair:
        window = pair.far.expose("bytes", memory, block_bytes=nbytes)
        remote = await pair.left.window("bytes")
        into = bytearray(nbytes)
        outcome = await remote.get(window.offer([0]), into=into)
        assert outcome.complete
        assert into == memory


async def test_a_get_that_is_cancelled_while_the_peer_is_dialled() -> None:
    """It is not begun afterwards: its memory is the caller's."""
    memory = bytearray(content(64))
    async with connected("tcp", prefer=("local",)) as pair:
        window = pair.far.expose("bytes", memory, block_bytes=64)
        peer = pair.near.peer(str(pair.address))
        remote = await peer.window("bytes")
        assert (await remote.get(window.offer([0]), into=bytearray(64))).complete
        assert remote.way == "process_vm_readv"
        assert peer.connection is not None
        await peer.connection.close()
        into = bytearray(64)
        request = remote.get(window.offer([0]), into=into)
        request.cancel()
        await request.released()
        later = bytearray(64)
        assert (await remote.get(window.offer([0]), into=later)).complete
        assert later == memory
        assert not any(into)


async def test_a_get_whose_deadline_passes_while_the_peer_is_dialled() -> None:
    """It ends then, with its blocks missing."""
    memory = bytearray(content(64))
    async with connected("tcp") as pair:
        window = pair.far.expose("bytes", memory, block_bytes=64)
        peer = pair.near.peer(str(pair.address))
        remote = await peer.window("bytes")
        assert peer.connection is not None
        await peer.connection.close()
        into = bytearray(64)
        request = remote.get(window.offer([0]), into=into, deadline=1e-6)
        outcome = await request
        assert not outcome.complete
        assert "deadline" in outcome.missing["bytes", 0]


async def test_close_does_not_wait_for_a_reader_by_messages() -> None:
    """It cannot touch the memory; whether it answers does not matter."""
    memory = bytearray(content(64))
    async with connected("tcp") as pair:
        window = pair.far.expose("bytes", memory, block_bytes=64)
        await pair.left.window("bytes")
        closing = asyncio.ensure_future(window.close())
        await turns(1)
        assert closing.done()
        await closing


async def test_a_get_that_crosses_the_end_of_its_window() -> None:
    """Its blocks are missing, and the connection goes on."""
    memory = bytearray(content(64))
    async with connected("tcp") as pair:
        window = pair.far.expose("bytes", memory, block_bytes=64)
        remote = await pair.left.window("bytes")
        ticket = window.offer([0])
        await window.close()
        outcome = await remote.get(ticket, into=bytearray(64))
        # The reader may read of the close before its get, or in the answer to it.
        reason = outcome.missing["bytes", 0]
        assert reason.startswith("withdrawn: ")
        assert "the window was closed" in reason
        await pair.left.send(1, b"x")
        assert await pair.right.recv(1) == b"x"


# --- lanes ----------------------------------------------------------------------------


async def test_a_lane_that_is_lost_and_its_successor() -> None:
    """Reads go by messages in between, and in place again afterwards."""
    memory = bytearray(content(64))
    async with connected("tcp", prefer=("local",)) as pair:
        window = pair.far.expose("bytes", memory, block_bytes=64)
        remote = await pair.left.window("bytes")
        ticket = window.offer([0])
        for _ in range(2):
            assert remote.way == "process_vm_readv"
            (lane,) = inside.lanes(pair.left).open
            lane.lane.abort()
            into = bytearray(64)
            assert (await remote.get(ticket, into=into)).complete
            assert into == memory
            await until(lambda: remote.way == "process_vm_readv")
        await window.close()
        assert not inside.shown(pair.right)


@needs_reading
@pytest.mark.parametrize("ends", ["reader", "owner"])
async def test_close_waits_for_reads_of_a_lane(ends: str) -> None:
    """Their bytes are under way: until they are over, the memory is read."""
    memory = bytearray(content(256 * MIB))
    async with connected("tcp", **UCX) as pair:
        window = pair.far.expose("bytes", memory, block_bytes=MIB)
        remote = await pair.left.window("bytes")
        assert remote.way == "ucx"
        into = np.zeros_like(memory)
        request = remote.get(window.offer(range(256)), into=into)
        reader = inside.reader(remote)
        assert reader is not None
        await until(partial(is_busy, reader))
        assert not request.done()
        if ends == "reader":
            await remote.close()
        await window.close()
        assert not is_busy(reader)
        await request


@needs_reading
async def test_a_get_of_a_lane_that_is_cancelled() -> None:
    """Its memory is released once the lane does not write to it any more."""
    memory = bytearray(content(256 * MIB))
    async with connected("tcp", **UCX) as pair:
        window = pair.far.expose("bytes", memory, block_bytes=MIB)
        remote = await pair.left.window("bytes")
        into = np.zeros_like(memory)
        request = remote.get(window.offer(range(256)), into=into)
        reader = inside.reader(remote)
        assert reader is not None
        await until(partial(is_busy, reader))
        request.cancel()
        with pytest.raises(kvwire.RequestCancelled):
            await request
        await request.released()
        assert not is_busy(reader)


async def test_a_cancelled_opening() -> None:
    """At any moment: the window is closed again, and its owner waits for nobody."""
    memory = bytearray(content(64))
    async with connected("tcp", prefer=("local",)) as pair:
        window = pair.far.expose("bytes", memory, block_bytes=64)
        for count in range(30):
            opening = asyncio.ensure_future(pair.left.window("bytes"))
            await turns(count)
            opening.cancel()
            result = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(result[0], kvwire.RemoteWindow):
                await result[0].close()
        await until(lambda: not inside.shown(pair.right))
        await window.close()
        assert window.closed


async def test_a_get_of_more_than_links_copy(pair: Pair) -> None:
    """Over every link it comes in one frame, whose memory is lent."""
    memory = bytearray(content(4 * 60_000))
    window = pair.far.expose("bytes", memory, block_bytes=60_000)
    remote = await pair.left.window("bytes")
    into = bytearray(len(memory))
    for _ in range(3):
        assert (await remote.get(window.offer(range(4)), into=into)).complete
        assert into == memory


async def test_an_opening_does_not_wait_for_a_lane_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that delays its part of a lane gets a window that is read by messages."""
    never = asyncio.Event()

    async def ready(_: WindowReader) -> None:
        await never.wait()

    memory = bytearray(content(64))
    async with connected("tcp", prefer=("local",)) as pair:
        window = pair.far.expose("bytes", memory, block_bytes=64)
        monkeypatch.setattr("kvwire_local.windows.LocalWindowReader.ready", ready)
        async with asyncio.timeout(30):
            remote = await pair.left.window("bytes", deadline=0.2)
        assert remote.way == "messages"
        into = bytearray(64)
        assert (await remote.get(window.offer([0]), into=into)).complete
        assert into == memory
        await remote.close()
        never.set()


async def test_a_reader_that_holds_on_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers pings, and never says that it no longer reads."""
    async with connected(prefer=("local", "tcp"), far={"close_timeout_s": 0.2}) as pair:
        window = pair.far.expose("w", bytearray(1 << 16), block_bytes=4096)
        remote = await pair.left.window("w")
        await until(lambda: remote.way != "messages")
        monkeypatch.setattr(PeerWindows, "closed", lambda *_: None)
        async with asyncio.timeout(PATIENCE_S):
            await window.close()
            await pair.right.wait_closed()
        with pytest.raises(kvwire.ConnectionLost, match="still reads window 'w'"):
            await pair.right.send(1, b"x")
