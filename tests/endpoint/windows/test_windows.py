"""Windows: finished blocks are read as offered, or are missing with a reason."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire.driver.checksums import ChecksumPolicy
from kvwire.endpoint.windows import shown
from kvwire.endpoint.windows.fields import encode_geometry
from kvwire.endpoint.windows.window import WINDOWS_MAX
from kvwire.kv.layout import Layout
from kvwire.limits import WINDOW_GET_BLOCKS_MAX
from kvwire.memory.arena import Arena
from kvwire_certify.conformance.rig import open_descriptors
from kvwire_certify.oracle import content
from tests.support.caches import STORED, Filled
from tests.support.pairs import Pair, connected, turns

SOURCE = Filled(seed=1)


async def opened(
    pair: Pair, source: Filled = SOURCE, name: str = "kv"
) -> tuple[kvwire.Window, kvwire.RemoteWindow]:
    """A window of the far side, and the near side's end of it."""
    window = pair.far.expose(name, source.cache)
    return window, await pair.left.window(name)


def arrived(
    source: Filled, blocks: Sequence[int], target: Filled, into: Sequence[int]
) -> bool:
    """Whether these blocks of the target begin with the tokens of the source's."""
    sent = source.tokens(list(blocks))
    here = target.tokens(list(into))[:, :, : sent.shape[2]]
    return bool((sent == here).all())


# --- reading --------------------------------------------------------------------------


async def test_blocks_that_are_offered(pair: Pair) -> None:
    """In the ticket's order, into any blocks of the reader; others stay."""
    window, remote = await opened(pair)
    target = Filled()
    outcome = await remote.get(
        window.offer([3, 1, 4]), into=target.cache, blocks=[5, 0, 9]
    )
    assert outcome.complete
    assert outcome.usable_prefix == 3
    assert outcome.usable_tokens == 3 * STORED.block_tokens
    assert sorted(outcome.landed) == [("kv", 0), ("kv", 5), ("kv", 9)]
    assert not outcome.missing
    assert arrived(SOURCE, [3, 1, 4], target, [5, 0, 9])
    untouched = [block for block in range(16) if block not in (0, 5, 9)]
    assert not target.tokens(untouched).any()


SHAPES: list[tuple[Layout, int, int]] = [
    ("HND", STORED.block_tokens, 3),
    ("NHD", STORED.block_tokens // 2, 6),
    ("HND", STORED.block_tokens // 2, 6),
    ("NHD", STORED.block_tokens * 2, 2),
    ("HND", STORED.block_tokens * 4, 1),
]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("layout", "block_tokens", "count"), SHAPES)
async def test_another_layout_and_block_size(
    pair: Pair,
    layout: Layout,
    block_tokens: int,
    count: int,
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a pull can map; a last block of the reader may be filled in part."""
    if not together:
        monkeypatch.setattr(shown, "WINDOW_DATA_BYTES_MAX", 0)
    window, remote = await opened(pair)
    spec = replace(STORED, block_tokens=block_tokens)
    target = Filled(spec=spec, layout=layout)
    into = random.Random(count).sample(range(16), count)
    outcome = await remote.get(window.offer([7, 2, 8]), into=target.cache, blocks=into)
    assert outcome.complete
    assert outcome.usable_tokens == 3 * STORED.block_tokens
    assert arrived(SOURCE, [7, 2, 8], target, into)


async def test_many_in_one_turn(pair: Pair) -> None:
    """Each gets its own blocks and its own outcome."""
    window, remote = await opened(pair)
    target = Filled()
    ticket = window.offer(range(16))
    window.withdraw([5])
    outcomes = await asyncio.gather(
        *(
            remote.get(ticket, into=target.cache, blocks=[15 - n], positions=[n])
            for n in range(16)
        )
    )
    assert [outcome.complete for outcome in outcomes] == [n != 5 for n in range(16)]
    assert arrived(SOURCE, range(5), target, range(15, 10, -1))
    assert arrived(SOURCE, range(6, 16), target, range(9, -1, -1))


async def test_more_blocks_than_a_frame_names(pair: Pair) -> None:
    """They are asked for in several frames."""
    count = WINDOW_GET_BLOCKS_MAX + 10
    memory = content(8 * count)
    window = pair.far.expose("bytes", memory, block_bytes=8)
    remote = await pair.left.window("bytes")
    into = bytearray(len(memory))
    outcome = await remote.get(window.offer(range(count)), into=into)
    assert outcome.complete
    assert into == memory


async def test_plain_bytes(pair: Pair) -> None:
    """Blocks of memory, which land one behind the other or where the reader says."""
    memory = content(64)
    window = pair.far.expose("bytes", memory, block_bytes=16)
    remote = await pair.left.window("bytes")
    into = bytearray(32)
    assert (await remote.get(window.offer([3, 1]), into=into)).complete
    assert into == memory[48:] + memory[16:32]
    assert (await remote.get(window.offer([0]), into=into, blocks=[1])).complete
    assert into == memory[48:] + memory[:16]


async def test_gets_in_a_row_let_other_tasks_run() -> None:
    """Also where each is over at once: a connection's pings need the loop, too."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with connected("tcp", prefer=("local",)) as pair:
        window, remote = await opened(pair)
        assert remote.way == "process_vm_readv"
        target = Filled()
        ticket = window.offer([1])
        task = asyncio.create_task(other())
        for _ in range(200):
            assert (await remote.get(ticket, into=target.cache, blocks=[0])).complete
        task.cancel()
    assert turns >= 3


# --- withdrawn ------------------------------------------------------------------------


async def test_a_block_that_is_withdrawn(pair: Pair) -> None:
    """It is missing, for ever; the others land. A new offer is another right."""
    window, remote = await opened(pair)
    target = Filled()
    old = window.offer([3, 1, 4])
    window.withdraw([1])
    outcome = await remote.get(old, into=target.cache, blocks=[0, 1, 2])
    assert not outcome.complete
    assert outcome.state == "partial"
    assert list(outcome.missing) == [("kv", 1)]
    assert "taken the block back" in outcome.missing["kv", 1]
    assert outcome.usable_prefix == 1
    assert arrived(SOURCE, [3, 4], target, [0, 2])
    new = window.offer([1])
    assert (await remote.get(new, into=target.cache, blocks=[1])).complete
    again = await remote.get(old, into=target.cache, blocks=[0, 1, 2])
    assert list(again.missing) == [("kv", 1)]


async def test_everything_is_withdrawn(pair: Pair) -> None:
    """Nothing lands."""
    window, remote = await opened(pair)
    ticket = window.offer([1, 2])
    window.withdraw()
    outcome = await remote.get(ticket, into=Filled().cache, blocks=[0, 1])
    assert outcome.state == "failed"
    assert outcome.usable_tokens == 0


async def test_the_last_tokens_of_a_group_are_no_beginning(pair: Pair) -> None:
    """A group with a shorter list has the last tokens: only all of it is of use."""
    full, sliding = Filled(seed=3), Filled(seed=4)
    into = [Filled(), Filled()]
    source, target = (
        kvwire.PagedCache.grouped(
            {"full": (STORED, one.tensors), "sliding": (STORED, other.tensors)}
        )
        for one, other in ((full, sliding), into)
    )
    window = pair.far.expose("kv", source)
    remote = await pair.left.window("kv")
    ticket = window.offer({"full": range(8), "sliding": [6, 7]})
    blocks = {"full": range(8), "sliding": [2, 3]}
    whole = await remote.get(ticket, into=target, blocks=blocks)
    assert (whole.usable_prefix, whole.usable_tokens) == (8, 8 * STORED.block_tokens)
    window.withdraw({"full": [5], "sliding": []})
    part = await remote.get(ticket, into=target, blocks=blocks)
    assert list(part.missing) == [("full", 5)]
    assert (part.usable_prefix, part.usable_tokens) == (0, 0)


async def test_a_ticket_of_another_life(pair: Pair) -> None:
    """Of a window of the same name that was closed: missing, and not an error."""
    window, remote = await opened(pair)
    old = window.offer([1])
    await window.close()
    other, reopened = await opened(pair)
    outcome = await reopened.get(old, into=Filled().cache, blocks=[0])
    assert "another window" in outcome.missing["kv", 0]
    gone = await remote.get(other.offer([1]), into=Filled().cache, blocks=[0])
    assert "window was closed" in gone.missing["kv", 0]


async def test_a_frame_that_is_damaged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are missing, and not written to."""
    window, remote = await opened(pair)
    seal = ChecksumPolicy.seal
    monkeypatch.setattr(ChecksumPolicy, "seal", lambda *given: (seal(*given)[0], 1))
    target = Filled()
    outcome = await remote.get(window.offer([3]), into=target.cache, blocks=[0])
    if remote.way == "messages":
        assert outcome.missing["kv", 0].startswith("damaged")
        assert not target.tokens([0]).any()


async def test_neighbours_of_a_block_that_is_taken_back_are_read_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner overwrites it while its chunk, which has others' bytes, is sent."""
    memory = bytearray(content(2 << 20))
    window = pair.far.expose("bytes", memory, block_bytes=64 << 10)
    remote = await pair.left.window("bytes")
    ticket = window.offer(range(32))
    seal = ChecksumPolicy.seal
    sealed: list[object] = []

    def sealing(*given: Any) -> Any:
        payload, check = seal(*given)
        sealed.append(check)
        if len(sealed) > 1:
            return payload, check
        window.withdraw([3])
        return payload, 1

    monkeypatch.setattr(ChecksumPolicy, "seal", sealing)
    into = bytearray(len(memory))
    outcome = await remote.get(ticket, into=into)
    if remote.way == "messages":
        (reason,) = outcome.missing.reasons
        assert reason.startswith("withdrawn")
        assert [block for _, block in outcome.missing] == [3]
        assert len(outcome.landed) == 31
        assert into[4 << 16 :] == memory[4 << 16 :]


# --- its end --------------------------------------------------------------------------


async def test_close_waits_for_bytes_under_way(pair: Pair) -> None:
    """Then the memory is free, and a get under way ends without a wrong byte."""
    memory = bytearray(content(32 << 20))
    before = bytes(memory)
    window = pair.far.expose("bytes", memory, block_bytes=1 << 20)
    remote = await pair.left.window("bytes")
    into = bytearray(len(memory))
    request = remote.get(window.offer(range(32)), into=into)
    await window.close()
    memory[:] = bytes(len(memory))
    outcome = await request
    for _, block in outcome.landed:
        part = slice(block << 20, (block + 1) << 20)
        assert into[part] == before[part]
    assert window.closed
    with pytest.raises(kvwire.UsageError, match="closed"):
        window.offer([1])


async def test_the_connection_is_lost(pair: Pair) -> None:
    """Blocks are gone, with the reason; the window can be closed."""
    window, remote = await opened(pair)
    ticket = window.offer([1])
    pair.left.abort("to see")
    outcome = await remote.get(ticket, into=Filled().cache, blocks=[0])
    assert outcome.missing["kv", 0].startswith("gone: ")
    await window.close()


@asynccontextmanager
async def mapped(
    block_bytes: int,
) -> AsyncIterator[tuple[Pair, kvwire.Window, kvwire.RemoteWindow]]:
    """A window of 16 blocks of ones that the other side has mapped."""
    arena = Arena(16 * block_bytes)
    memory = arena.buffer(16 * block_bytes)
    memory[:] = 1
    async with connected(transport="local") as pair:
        window = pair.far.expose("bytes", memory, block_bytes=block_bytes)
        remote = await pair.left.window("bytes")
        assert remote.way == "mapped"
        yield pair, window, remote
        await remote.close()
        await window.close()
    arena.release()  # the test still refers to the window


arenas = pytest.mark.skipif(sys.platform != "linux", reason="arenas are of Linux only")


@arenas
async def test_tasks_that_get_in_sequence_take_turns() -> None:
    """Gets that complete at once hold the loop for a few blocks only."""
    order: list[int] = []
    ended: list[int] = []
    async with mapped(1 << 12) as (_, window, remote):
        ticket = window.offer([0])

        async def reads(number: int) -> None:
            into = bytearray(1 << 12)
            for _ in range(200):
                assert (await remote.get(ticket, into=into)).complete
                order.append(number)
            ended.append(len(order))

        await asyncio.gather(*(reads(number) for number in range(4)))
    # While all four read; the last one is alone in the end.
    assert max(len(list(run)) for _, run in groupby(order[: ended[0]])) <= 20


@arenas
@pytest.mark.parametrize("block_bytes", [1 << 12, 1 << 20])
async def test_a_burst_of_gets_copies_a_little_in_each_turn(block_bytes: int) -> None:
    """However many are begun before the first await, and however large they are."""
    async with mapped(block_bytes) as (_, window, remote):
        ticket = window.offer(range(2))
        targets = [bytearray(2 * block_bytes) for _ in range(40)]
        gets = [remote.get(ticket, into=into) for into in targets]
        copied = 0
        while copied < len(gets):
            now = sum(into[-1] for into in targets)
            assert now - copied <= 8
            copied = now
            await asyncio.sleep(0)
        assert all([(await get).complete for get in gets])


@arenas
async def test_gets_that_wait_for_their_turn_are_cancelled_late_or_withdrawn() -> None:
    """Nothing is copied for them, and each says why."""
    async with mapped(1 << 12) as (_, window, remote):
        ticket = window.offer([0])
        first = [remote.get(ticket, into=bytearray(1 << 12)) for _ in range(8)]
        targets = [bytearray(1 << 12) for _ in range(3)]
        cancelled, late, stale = (
            remote.get(ticket, into=into, deadline=at)
            for into, at in zip(targets, (None, 0, None), strict=True)
        )
        cancelled.cancel()
        window.withdraw([0])
        assert (await first[0]).complete
        assert not (await first[-1]).complete
        with pytest.raises(kvwire.RequestCancelled):
            await cancelled
        assert (await late).missing.reasons == ("the deadline passed",)
        assert "withdrawn" in (await stale).missing.reasons[0]
        for get in (cancelled, late, stale):
            await get.released()
        assert not any(targets[0] + targets[1])


@arenas
@pytest.mark.parametrize("blocks", [1, 16])
async def test_a_read_without_memory_ends(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for its turn, or takes several: no caller is left for an error."""

    def fail(*_: object) -> None:
        raise MemoryError("no memory for it")

    async with mapped(1 << 18) as (_, window, remote):
        ticket = window.offer(range(blocks))
        gets = [remote.get(ticket, into=bytearray(blocks << 18)) for _ in range(8)]
        monkeypatch.setattr("kvwire_local.windows.LocalWindowReader.read", fail)
        await turns(50)
        assert gets[-1].done()
        assert gets[-1].result().missing.reasons == ("no memory for it",)
        await gets[-1].released()


@arenas
@pytest.mark.parametrize("ends", ["window", "remote", "connection"])
async def test_gets_that_wait_for_their_turn_outlive_no_window(ends: str) -> None:
    """They end, complete or with a reason, whatever ends first."""
    async with mapped(1 << 12) as (pair, window, remote):
        ticket = window.offer([0])
        gets = [remote.get(ticket, into=bytearray(1 << 12)) for _ in range(8)]
        if ends == "window":
            await window.close()
        elif ends == "remote":
            await remote.close()
        else:
            pair.left.abort("to see")
        outcomes = [await get for get in gets]
        assert outcomes[0].complete
        for one in outcomes:
            assert one.complete or re.match("gone: |withdrawn", one.missing.reasons[0])


@arenas
async def test_mapped_memory_outlives_its_connection() -> None:
    """What was offered is still right, and what is withdrawn is still missing."""
    size = 1 << 16
    arena = Arena(size)
    memory = arena.buffer(size)
    memory[:] = np.frombuffer(content(size), np.uint8)
    async with connected(transport="local") as pair:
        window = pair.far.expose("bytes", memory, block_bytes=1 << 12)
        remote = await pair.left.window("bytes")
        assert remote.way == "mapped"
        before = remote.owner_gone
        ticket = window.offer([1, 2])
        pair.left.abort("to see")
        into = bytearray(2 << 12)
        assert (await remote.get(ticket, into=into)).complete
        assert (before, remote.owner_gone) == (False, True)
        assert into == memory[1 << 12 : 3 << 12].tobytes()
        window.withdraw([2])
        outcome = await remote.get(ticket, into=into)
        assert list(outcome.missing) == [("bytes", 1)]
        await remote.close()
        gone = await remote.get(ticket, into=into)
        assert gone.state == "failed"
        await window.close()
    del memory, window
    arena.close()


@pytest.mark.skipif(sys.platform != "linux", reason="arenas are of Linux only")
async def test_a_window_that_is_dropped_leaves_no_descriptor() -> None:
    """As happens when a task is cancelled at the moment in which it gets the window."""
    arena = Arena(1 << 16)
    async with connected(transport="local") as pair:
        window = pair.far.expose("bytes", arena.buffer(1 << 16), block_bytes=1 << 12)
        ways = [(await pair.left.window("bytes")).way for _ in range(3)]
        pair.left.abort("to see")
        await pair.left.wait_closed()
        gc.collect()
        left = [one for one in open_descriptors().values() if "pidfd" in one]
        assert (ways, left) == (["mapped"] * 3, [])
        await window.close()
    del window
    arena.close()


async def test_a_peer_reopens_its_window(pair: Pair) -> None:
    """A get after the end of a connection dials again."""
    window = pair.far.expose("kv", SOURCE.cache)
    peer = pair.near.peer(str(pair.address))
    remote = await peer.window("kv")
    target = Filled()
    assert (await remote.get(window.offer([1]), into=target.cache, blocks=[0])).complete
    first = peer.connection
    assert first is not None
    await first.close()
    assert (await remote.get(window.offer([2]), into=target.cache, blocks=[1])).complete
    assert peer.connection not in (None, first)
    assert arrived(SOURCE, [1, 2], target, [0, 1])
    await remote.close()
    assert remote.way == "closed"
    late = await remote.get(window.offer([2]), into=target.cache, blocks=[1])
    assert not late.complete


async def test_a_get_that_is_cancelled(pair: Pair) -> None:
    """Its blocks are free once it is released; the window goes on."""
    memory = content(32 << 20)
    window = pair.far.expose("bytes", memory, block_bytes=1 << 20)
    remote = await pair.left.window("bytes")
    into = bytearray(len(memory))
    request = remote.get(window.offer(range(32)), into=into)
    request.cancel()
    with pytest.raises(kvwire.RequestCancelled):
        await request
    await request.released()
    small = bytearray(1 << 20)
    assert (await remote.get(window.offer([7]), into=small)).complete
    assert small == memory[7 << 20 : 8 << 20]


async def test_a_reader_closes_its_window(pair: Pair) -> None:
    """The owner forgets it, and need not wait for it any more."""
    window, remote = await opened(pair)
    await remote.close()
    await remote.close()
    await window.close()
    assert remote.way == "closed"


# --- refused --------------------------------------------------------------------------


async def test_no_such_window(pair: Pair) -> None:
    """The text has the names that there are."""
    pair.far.expose("keys", SOURCE.cache)
    with pytest.raises(kvwire.AccessDenied, match=r"no window 'key'.*'keys'"):
        await pair.left.window("key")


@pytest.mark.parametrize("name", [None, "", b"key", 7, "x" * 500, "\ud800", SOURCE])
async def test_a_name_that_no_window_has(pair: Pair, name: Any) -> None:
    """It is refused here: the peer would end the connection for it."""
    with pytest.raises(kvwire.UsageError, match="window: name="):
        await pair.left.window(name)
    with pytest.raises(kvwire.UsageError, match="expose: name="):
        pair.far.expose(name, SOURCE.cache)
    await pair.left.send(1, b"still")
    assert bytes(await pair.right.recv(1)) == b"still"


async def test_a_name_with_half_of_a_pair_is_refused_for_that(pair: Pair) -> None:
    why = r"name='a.ud800': it has '.ud800', half of a surrogate pair"
    with pytest.raises(kvwire.UsageError, match=why):
        await pair.left.window("a\ud800")
    with pytest.raises(kvwire.UsageError, match=why):
        pair.far.expose("a\ud800", SOURCE.cache)


async def test_caches_that_do_not_fit(pair: Pair) -> None:
    """The error names the field."""
    window, remote = await opened(pair)
    other = Filled(spec=replace(STORED, head_dim=STORED.head_dim * 2))
    with pytest.raises(kvwire.ProfileMismatch, match="head_dim"):
        remote.get(window.offer([1]), into=other.cache, blocks=[0])
    with pytest.raises(kvwire.UsageError, match="exposes a cache"):
        remote.get(window.offer([1]), into=bytearray(100))


async def test_a_window_whose_description_is_wrong_is_refused_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one wrong byte of it ends all that the connection does."""

    def damaged(geometry: Any) -> bytes:
        return encode_geometry(geometry).replace(b"head_dim", b"head_din")

    pair.far.expose("kv", SOURCE.cache)
    with monkeypatch.context() as patched:
        patched.setattr(shown, "encode_geometry", damaged)
        with pytest.raises(kvwire.ProfileMismatch, match="head_dim"):
            await pair.left.window("kv")
    assert (await pair.left.window("kv")).way != "closed"


async def test_blocks_that_do_not_fit_the_ticket(pair: Pair) -> None:
    """Nothing is sent."""
    window, remote = await opened(pair)
    with pytest.raises(kvwire.UsageError, match="passed 2, but the ticket's 1 blocks"):
        remote.get(window.offer([1]), into=Filled().cache, blocks=[0, 1])


@pytest.mark.parametrize("cut", [0, 3, 20, 31, -1])
async def test_a_ticket_that_is_cut(pair: Pair, cut: int) -> None:
    """A UsageError, whatever is left of it."""
    window, remote = await opened(pair)
    ticket = window.offer([1, 2])
    with pytest.raises(kvwire.UsageError, match="ticket"):
        remote.get(ticket[:cut], into=Filled().cache, blocks=[0, 1])


async def test_tickets_that_are_forged(pair: Pair) -> None:
    """Any changed byte gives an error or a missing block."""
    window, remote = await opened(pair)
    ticket = window.offer([1])
    chosen = random.Random(6)
    for position in range(len(ticket)):
        forged = bytearray(ticket)
        forged[position] ^= 1 << chosen.randrange(8)
        target = Filled()
        try:
            outcome = await remote.get(bytes(forged), into=target.cache, blocks=[0])
        except kvwire.UsageError:
            continue
        padding = 28 <= position < 32
        assert outcome.complete == padding, position
    assert (await remote.get(ticket, into=Filled().cache, blocks=[0])).complete


@pytest.mark.parametrize(
    "positions",
    [
        1,
        "ab",
        [0.5],
        [None],
        [[0, 1]],
        [True, False, True],
        {0: 1},
        [[0], [1, 2]],
        [3],
        [-1],
    ],
    ids=str,
)
async def test_positions_are_integers_within_the_ticket(
    pair: Pair, positions: Any
) -> None:
    window, remote = await opened(pair)
    ticket = window.offer([1, 2, 3])
    with pytest.raises(kvwire.UsageError, match=r"^positions"):
        remote.get(ticket, Filled().cache, [0], positions=positions)


async def test_names_and_memory_that_are_refused(pair: Pair) -> None:
    """By their field."""
    pair.far.expose("kv", SOURCE.cache)
    with pytest.raises(kvwire.UsageError, match="expose"):
        pair.far.expose("kv", SOURCE.cache)
    for size in (0, 3, -1, None):
        with pytest.raises(kvwire.UsageError, match="block_bytes"):
            pair.far.expose("bytes", bytearray(16), block_bytes=size)
    with pytest.raises(kvwire.UsageError, match="block_bytes"):
        pair.far.expose("both", SOURCE.cache, block_bytes=4)


async def test_too_many_windows(pair: Pair) -> None:
    """A limit, which says what to do."""
    windows = [
        pair.far.expose(f"w{n}", bytearray(8), block_bytes=8)
        for n in range(WINDOWS_MAX)
    ]
    with pytest.raises(kvwire.UsageError, match="close some"):
        pair.far.expose("more", SOURCE.cache)
    for window in windows:
        await window.close()
    pair.far.expose("more", SOURCE.cache)
