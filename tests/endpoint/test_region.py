"""put and get on memory that was granted, and getting that memory back."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvwire
from kvwire.limits import CHUNK_BYTES
from kvwire_certify.oracle import content
from tests.support import inside
from tests.support.pairs import Pair, connected, until

SIZE = 2 * CHUNK_BYTES + 1000
# Several turns of the loop, whatever is faster.
HUGE = 16 << 20
LARGE = content(SIZE)


async def handed_over(pair: Pair, grant: kvwire.Grant) -> kvwire.Grant:
    """The grant as it arrives at the left end, which uses it."""
    await pair.right.send(99, grant.to_bytes())
    return kvwire.Grant.from_bytes(await pair.left.recv(99))


# --- moving bytes ---------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 1000, CHUNK_BYTES, SIZE])
async def test_put_then_get(pair: Pair, nbytes: int) -> None:
    memory, back = bytearray(nbytes), bytearray(nbytes)
    region = pair.far.register(memory, access="readwrite")
    grant = await handed_over(pair, region.grant(pair.right))
    assert await pair.left.put(LARGE[:nbytes], grant) == nbytes
    assert memory == LARGE[:nbytes]
    assert await pair.left.get(grant, into=back) == nbytes
    assert back == LARGE[:nbytes]


async def test_parts_of_a_grant(pair: Pair) -> None:
    memory = bytearray(SIZE)
    region = pair.far.register(memory, access="readwrite")
    grant = region.grant(pair.right, offset=100, nbytes=SIZE - 200)
    cuts = [0, 1, 500, CHUNK_BYTES + 7, len(grant)]
    edges = list(itertools.pairwise(cuts))
    await asyncio.gather(*(pair.left.put(LARGE[a:b], grant[a:b]) for a, b in edges))
    assert memory[100:-100] == LARGE[: len(grant)]
    assert memory[:100] == memory[-100:] == bytes(100)
    part = bytearray(50)
    assert await pair.left.get(grant[25:75], part) == 50
    assert part == LARGE[25:75]


async def test_nothing_of_nothing(pair: Pair) -> None:
    grant = pair.far.register(bytearray(8), access="readwrite").grant(pair.right)
    assert await pair.left.put(b"", grant[3:3]) == 0
    assert await pair.left.get(grant[8:], bytearray()) == 0


async def test_a_region_says_what_it_is(pair: Pair) -> None:
    region = pair.far.register(b"constant")
    assert len(region) == 8
    assert region.access is kvwire.Access.READ
    assert "8 bytes" in repr(region)
    assert "open" in repr(region)
    await region.close()
    assert "closed" in repr(region)
    assert len(inside.buffers(pair.far)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": -1},
        {"offset": 9},
        {"nbytes": 9},
        {"nbytes": -1},
        {"offset": 1, "nbytes": 8},
        {"offset": True},
        {"nbytes": True},
        {"access": "write"},
        {"access": "readwrite"},
        {"access": "all"},
    ],
)
async def test_a_grant_is_never_more_than_the_region(wrong: dict[str, Any]) -> None:
    async with connected("inproc") as pair:
        region = pair.far.register(bytes(8), access="read")
        with pytest.raises(kvwire.UsageError, match=r"grant|access"):
            region.grant(pair.right, **wrong)


async def test_a_grant_is_of_one_connection(pair: Pair) -> None:
    other = await pair.near.connect(pair.address)
    other_end = await anext(pair.far.connections())
    region = pair.far.register(bytearray(8), "readwrite")
    grant = region.grant(pair.right)
    with pytest.raises(kvwire.UsageError, match="ask the peer for a new grant"):
        other.put(bytes(8), grant)
    with pytest.raises(kvwire.UsageError, match="another communicator"):
        region.grant(pair.left)
    await other_end.close()
    with pytest.raises(kvwire.ClosedOK):
        region.grant(other_end)


# --- what the owner of the memory refuses ---------------------------------------------


async def test_a_direction_that_was_not_granted(pair: Pair) -> None:
    memory = bytearray(b"precious")
    region = pair.far.register(memory, "readwrite")
    read, write = (region.grant(pair.right, access=a) for a in ("read", "write"))
    with pytest.raises(kvwire.AccessDenied, match="does not allow"):
        await pair.left.put(b"replaced", read)
    with pytest.raises(kvwire.AccessDenied, match="does not allow"):
        await pair.left.get(write, bytearray(8))
    assert memory == b"precious"
    assert await pair.left.get(read, bytearray(8)) == 8


@pytest.mark.parametrize("end", ["revoke", "close"])
async def test_an_ended_grant_is_stale(pair: Pair, end: str) -> None:
    memory = bytearray(b"precious")
    region = pair.far.register(memory, "readwrite")
    grant = region.grant(pair.right)
    if end == "revoke":
        region.revoke()
    else:
        await region.close()
    with pytest.raises(kvwire.StaleRegion):
        await pair.left.put(b"replaced", grant)
    with pytest.raises(kvwire.StaleRegion):
        await pair.left.get(grant, bytearray(8))
    assert memory == b"precious"


async def test_a_revoked_region_grants_anew_and_a_closed_one_does_not(
    pair: Pair,
) -> None:
    region = pair.far.register(bytearray(8), "readwrite")
    region.revoke()
    assert await pair.left.put(b"replaced", region.grant(pair.right)) == 8
    await region.close()
    await region.close()
    with pytest.raises(kvwire.UsageError, match="closed"):
        region.grant(pair.right)


# --- getting memory back --------------------------------------------------------------


async def test_close_waits_for_what_is_under_way() -> None:
    """A put whose bytes are on the wire: the region is closed, the memory is not free.

    A peer that has stopped within a chunk is the one who can still write.
    """
    async with connected("tcp") as pair:
        memory = bytearray(HUGE)
        region = pair.far.register(memory, "write")
        put = pair.left.put(bytes(len(memory)), region.grant(pair.right))
        holds = inside.buffers(pair.far).holds
        await until(lambda: holds.held(region._record.buffer))
        closing = asyncio.create_task(region.close())
        await asyncio.sleep(0)
        assert "closed" in repr(region)
        assert not closing.done()
        with pytest.raises(kvwire.StaleRegion):
            await put
        await closing
        assert not holds.held(region._record.buffer)
        assert len(inside.buffers(pair.far)) == 0
        await put.released()
        assert len(inside.buffers(pair.near)) == 0


async def test_a_lost_connection_gives_the_memory_back(pair: Pair) -> None:
    region = pair.far.register(bytearray(HUGE), "write")
    put = pair.left.put(bytes(HUGE), region.grant(pair.right))
    await asyncio.sleep(0)
    assert inside.core(pair.left).sending
    pair.left.abort()
    with pytest.raises(kvwire.ConnectionLost):
        await put
    await put.released()
    await region.close()
    assert len(inside.buffers(pair.near)) == len(inside.buffers(pair.far)) == 0


GRANT = kvwire.Grant(
    access=kvwire.Access.READWRITE,
    connection=bytes(range(16)),
    grant=7,
    generation=2,
    token=b"secret token 16b",
    offset=100,
    nbytes=50,
)
_U63 = st.integers(0, 2**63 - 1)
_SIZES = st.integers(0, 64 << 30)

grants = st.builds(
    kvwire.Grant,
    access=st.sampled_from(
        [kvwire.Access.READ, kvwire.Access.WRITE, kvwire.Access.READWRITE]
    ),
    connection=st.binary(min_size=16, max_size=16),
    grant=_U63,
    generation=_U63,
    token=st.binary(min_size=16, max_size=16),
    offset=_SIZES,
    nbytes=_SIZES,
)


@given(grant=grants)
def test_bytes_and_back(grant: kvwire.Grant) -> None:
    raw = grant.to_bytes()
    assert kvwire.Grant.from_bytes(raw) == grant
    assert kvwire.Grant.from_bytes(memoryview(bytearray(raw))) == grant
    assert len(raw) <= 160


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *((0, b"kvg2"), (4, b"\0"), (4, b"\4"), (5, b"\1"), (7, b"\1")),
        *((24, b"\xff" * 8), (56, b"\xff" * 8)),
    ],
    ids=[
        *("magic", "no access", "unknown access", "beside access", "behind access"),
        *("grant", "offset"),
    ],
)
def test_each_field_is_checked(at: int, value: bytes) -> None:
    raw = bytearray(GRANT.to_bytes())
    raw[at : at + len(value)] = value
    with pytest.raises(kvwire.UsageError, match="not a grant of this version"):
        kvwire.Grant.from_bytes(raw)


_INDEX = st.none() | st.integers(-60, 60)


@given(start=_INDEX, stop=_INDEX)
def test_slices_are_those_of_bytes(start: int | None, stop: int | None) -> None:
    whole = range(GRANT.offset, GRANT.offset + GRANT.nbytes)
    expected, part = whole[start:stop], GRANT[start:stop]
    assert len(part) == part.nbytes == len(expected)
    if expected:
        assert part.offset == expected.start
    assert part[:].token == GRANT.token


def test_the_token_is_never_shown() -> None:
    shown = f"{GRANT!r} {GRANT}"
    for spelling in (GRANT.token.decode(), GRANT.token.hex()):
        assert spelling not in shown
    assert "nbytes=50" in shown
