"""A peer that misuses windows: refused by rule, or harmless, and the process lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

import kvwire
from kvwire import Connection
from kvwire.endpoint.windows.fields import encode_geometry, encode_memory
from kvwire.endpoint.windows.map import geometry_of_pools, placed
from kvwire.endpoint.windows.ticket import read_ticket, write_ticket
from kvwire.kv.geometry import Geometry
from kvwire.limits import REQUEST_BYTES_MAX, WINDOW_GET_BLOCKS_MAX
from kvwire.proto.windows import WINDOWS_OPEN_MAX
from kvwire.wire.control import (
    WindowClose,
    WindowGet,
    WindowGot,
    WindowMemoryBody,
    WindowOpen,
    WindowOpened,
    WindowViewBody,
)
from kvwire.wire.header import FrameType
from tests.fault.stranger import Stranger, answering, dial, expect_ended_by
from tests.support import inside
from tests.support.caches import STORED, Filled
from tests.support.cases import each
from tests.support.pairs import Pair, connected, until

SOURCE = Filled(seed=1)
GEOMETRY = encode_geometry(geometry_of_pools(SOURCE.cache))
BLOCK_BYTES = sum(tensor[0].nbytes for tensor in SOURCE.tensors)
# Enough of them to show that something grows.
MANY = 3 * WINDOWS_OPEN_MAX

Forged = Callable[[Stranger], bytes]


def view(geometry: bytes, number: int = 0) -> Forged:
    body = WindowViewBody(1, number, geometry)
    return lambda stranger: stranger.control(FrameType.WINDOW_VIEW, body)


def get(
    entries: Any = (0,),
    generations: Any = None,
    *,
    counts: tuple[int, ...] | None = None,
    nbytes: int | None = None,
    window: int = 1,
    number: int = 0,
) -> Forged:
    count = len(entries)
    body = WindowGet(
        window,
        number,
        BLOCK_BYTES * count if nbytes is None else nbytes,
        counts or (count,),
        np.array(entries, "<u4").tobytes(),
        bytes(8 * count) if generations is None else generations.tobytes(),
    )
    # The first request opened the window.
    return lambda stranger: stranger.control(FrameType.WINDOW_GET, body, request=3)


async def exposed(pair: Pair, stranger: Stranger) -> tuple[kvwire.Window, Connection]:
    """A window that the stranger has open."""
    there = await pair.far.accept()
    window = pair.far.expose("kv", SOURCE.cache)
    body = WindowOpen(name="kv")
    await stranger.say(stranger.control(FrameType.WINDOW_OPEN, body, request=1))
    await until(lambda: inside.shown(there))
    return window, there


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Over sockets, where strangers come from."""
    async with connected("tcp") as found:
        yield found


async def expect_fine(pair: Pair) -> None:
    """Another connection goes on."""
    await asyncio.gather(pair.left.send(1, b"there"), pair.right.send(1, b"back"))
    assert await pair.right.recv(1) == b"there"
    assert await pair.left.recv(1) == b"back"


# --- a hostile reader -----------------------------------------------------------------

GEOMETRIES: dict[str, bytes] = {
    "nothing": b"",
    "no groups": msgspec.msgpack.encode(()),
    "nested": b"\x91" * 1000,
    "numbers": msgspec.msgpack.encode((1, 2, 3)),
    "another model": encode_geometry(
        geometry_of_pools(Filled(spec=replace(STORED, head_dim=4)).cache)
    ),
    "many blocks": GEOMETRY.replace(b"\x10\xc0", b"\xce\xff\xff\xff\xff\xc0"),
    "large blocks": encode_geometry(
        geometry_of_pools(
            Filled(blocks=1, spec=replace(STORED, block_tokens=8191)).cache
        )
    ),
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
async def test_a_view_of_anything(pair: Pair, geometry: bytes) -> None:
    """Its gets are refused or answered; the window goes on."""
    async with dial(pair.address) as stranger:
        window, there = await exposed(pair, stranger)
        await stranger.say(view(geometry)(stranger), get()(stranger))
        await until(lambda: not inside.served_reads(there))
        await expect_fine(pair)
        await window.close()
    await there.wait_closed()
    assert not inside.buffers(pair.far)


@each(
    "forged",
    {
        "beyond the last block": get((SOURCE.blocks,)),
        "beyond all numbers": get((2**32 - 1,)),
        "other bytes": get(nbytes=BLOCK_BYTES + 1),
        "few bytes": get(nbytes=1),
        "all bytes": get(nbytes=REQUEST_BYTES_MAX),
        "other groups": get((0, 0), counts=(1, 1)),
        "more than there are": get((0,), counts=(2**32 - 1,)),
        "none of a group": get((0,), counts=(1, 0)),
    },
)
async def test_a_get_of_what_is_not_there(pair: Pair, forged: Forged) -> None:
    """Its connection ends by the rule."""
    async with dial(pair.address) as stranger:
        window, there = await exposed(pair, stranger)
        await stranger.say(view(GEOMETRY)(stranger), forged(stranger))
        await stranger.expect_gone()
        await expect_ended_by("KVW-WN-05", there)
        await expect_fine(pair)
        await window.close()
    assert not inside.buffers(pair.far)


@pytest.mark.parametrize(
    "forged", [get(window=7), get(number=9), get((0,) * WINDOW_GET_BLOCKS_MAX)]
)
async def test_a_get_that_is_refused(pair: Pair, forged: Forged) -> None:
    """Of no window, with no view, or of guessed generations: nothing is sent."""
    async with dial(pair.address) as stranger:
        window, there = await exposed(pair, stranger)
        await stranger.say(view(GEOMETRY)(stranger), forged(stranger))
        types = [(await stranger.hear()).header.type for _ in range(2)]
        assert FrameType.WINDOW_OPENED in types
        assert FrameType.DATA not in types
        await window.close()
    await there.wait_closed()
    assert not inside.buffers(pair.far)


async def test_a_flood_of_openings_and_views(pair: Pair) -> None:
    """The state is bounded, whatever the number of frames."""
    async with dial(pair.address) as stranger:
        window, there = await exposed(pair, stranger)
        hearing = asyncio.ensure_future(stranger.expect_gone())
        for number in range(MANY):
            body = WindowOpen(name="kv")
            await stranger.say(
                stranger.control(FrameType.WINDOW_OPEN, body, request=3 + 2 * number),
                view(GEOMETRY, number % 64)(stranger),
            )
        await until(lambda: len(inside.shown(there)) >= WINDOWS_OPEN_MAX)
        await expect_fine(pair)
        assert len(inside.shown(there)) == WINDOWS_OPEN_MAX
        async with asyncio.timeout(10):
            await window.close()
        assert not inside.shown(there)
    hearing.cancel()
    await asyncio.gather(hearing, return_exceptions=True)
    await there.wait_closed()


async def test_a_reader_that_does_not_close(pair: Pair) -> None:
    """The owner does not wait for one that reads by messages only."""
    async with dial(pair.address) as stranger:
        window, there = await exposed(pair, stranger)
        await window.close()
        for mine in (True, False, True, False):
            body = WindowClose(1, mine=mine)
            await stranger.say(stranger.control(FrameType.WINDOW_CLOSE, body))
        await expect_fine(pair)
    await there.wait_closed()
    assert window.closed


# --- a hostile owner ------------------------------------------------------------------


async def lied_to(
    pair: Pair, answer: WindowOpened, *more: tuple[FrameType, Any]
) -> tuple[kvwire.RemoteWindow | BaseException, Connection]:
    """What opening a window comes to at an owner that answers so."""
    async with answering() as (address, answered):
        connecting = asyncio.create_task(pair.near.connect(address, transport="tcp"))
        stranger = await answered.get()
        await stranger.shake()
        connection = await connecting
        opening = asyncio.create_task(connection.window("kv"))
        while (await stranger.hear()).header.type != FrameType.WINDOW_OPEN:
            pass
        await stranger.say(
            stranger.control(FrameType.WINDOW_OPENED, answer, request=1),
            *(stranger.control(kind, body) for kind, body in more),
        )
        (result,) = await asyncio.gather(opening, return_exceptions=True)
        assert isinstance(result, kvwire.RemoteWindow | kvwire.KVWireError)
        if isinstance(result, kvwire.RemoteWindow):
            await ask(result, stranger)
        connection.abort("seen")
    await connection.wait_closed()
    return result, connection


async def ask(remote: kvwire.RemoteWindow, stranger: Stranger) -> None:
    """Get a block of it, which its owner refuses in a wrong way; nothing lands."""
    ticket = write_ticket(bytes(16), [1], np.array([0]), np.array([7], np.uint64))
    target = Filled()
    try:
        request = remote.get(ticket, target.cache, [0])
    except kvwire.KVWireError:
        return
    while (await stranger.hear()).header.type != FrameType.WINDOW_GET:
        pass
    body = WindowGot(sent=False)
    await stranger.say(stranger.control(FrameType.WINDOW_GOT, body, request=3))
    assert not (await request).landed
    assert not target.tokens(list(range(target.blocks))).any()


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
async def test_a_window_of_anything(pair: Pair, geometry: bytes) -> None:
    """It cannot be opened, or nothing lands."""
    await lied_to(pair, WindowOpened(1, bytes(16), geometry))
    await expect_fine(pair)
    assert not inside.buffers(pair.near)


@pytest.mark.parametrize("lane", [0, 1, 5])
async def test_memory_on_no_lane(pair: Pair, lane: int) -> None:
    """It is not used."""
    data = encode_memory(8, placed(SOURCE.cache))
    assert data is not None
    wrong = WindowMemoryBody(1, max(lane, 1), b"\x00", b"\x00")
    opened, _ = await lied_to(
        pair,
        WindowOpened(1, bytes(16), GEOMETRY, lane, data, b"key"),
        (FrameType.WINDOW_MEMORY, wrong),
        (FrameType.WINDOW_MEMORY, replace_window(wrong, 9)),
    )
    assert isinstance(opened, kvwire.RemoteWindow)
    await expect_fine(pair)


def replace_window(body: WindowMemoryBody, window: int) -> WindowMemoryBody:
    return WindowMemoryBody(window, body.lane, body.memory, body.access)


async def test_a_layout_of_tiny_pieces(pair: Pair) -> None:
    """Where each element of a large block lies alone, no table of them is made."""
    spec = replace(STORED, kv_heads=64, head_dim=64, block_tokens=512)
    large = Filled(blocks=1, spec=spec)
    (group,) = geometry_of_pools(large.cache).groups
    orders = Geometry((replace(group, order=tuple(reversed(group.order))),))
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        window = pair.far.expose("kv", large.cache)
        ticket = read_ticket(window.offer([0]))
        body = WindowOpen(name="kv")
        await stranger.say(stranger.control(FrameType.WINDOW_OPEN, body, request=1))
        await until(lambda: inside.shown(there))
        nbytes = sum(tensor.nbytes for tensor in large.tensors)
        await stranger.say(
            view(encode_geometry(orders))(stranger),
            get((0,), ticket.generations, nbytes=nbytes)(stranger),
        )
        types = [(await stranger.hear()).header.type for _ in range(2)]
        assert types == [FrameType.WINDOW_OPENED, FrameType.FAIL]
        await expect_fine(pair)
        await window.close()
    await there.wait_closed()
