"""put and get: every byte where it belongs, or a reason; no byte outside a grant."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvwire.errors import AccessDenied, IntegrityError, StaleRegion
from kvwire.limits import REQUEST_BYTES_MAX
from kvwire.memory.checksum import checksum
from kvwire.proto.records import RequestRecord
from kvwire.types import Access
from kvwire.wire.control import AccessBody, Announce, Fin
from kvwire.wire.header import FrameType
from tests.proto.moving import expect_broken, expect_error, expect_fine
from tests.support.core_pair.peer import ConnectionPair, Peer

CHUNK = 65_536
LARGE = 3 * CHUNK + 5
BEFORE = bytes(range(100))

Verb = Callable[[Peer, AccessBody], RequestRecord]


def put(peer: Peer, target: AccessBody) -> RequestRecord:
    return peer.put(b"\xee" * target.nbytes, target)


def get(peer: Peer, source: AccessBody) -> RequestRecord:
    return peer.get(source)


both_verbs = pytest.mark.parametrize("verb", [put, get])


def part(grant: AccessBody, offset: int, nbytes: int) -> AccessBody:
    return AccessBody(grant.grant, grant.generation, grant.token, offset, nbytes)


@pytest.mark.rule("KVW-OS-01", "KVW-OS-02", "keeps")
def test_put_and_get() -> None:
    """A part in the middle of a grant in the middle of a region, and only that."""
    for nbytes in [1, CHUNK - 1, CHUNK, CHUNK + 1, LARGE]:
        pair = ConnectionPair()
        region = pair.server.expose(bytes(nbytes + 40))
        grant = part(pair.server.grant(region, 10, nbytes + 20), 5, nbytes)
        data = bytes(n % 251 for n in range(nbytes))
        written = pair.client.put(data, grant)
        expect_fine(pair)
        assert pair.client.error(written) is None
        memory = pair.server.content(region.buffer)
        assert memory == bytes(15) + data + bytes(25)
        read = pair.client.get(grant)
        expect_fine(pair)
        assert pair.client.received(read) == data
        assert set(pair.server.memory) == {region.buffer}
        assert not pair.client.memory


# --- refused, and the connection lives


def expect_refused(
    change: Callable[[AccessBody], AccessBody], verb: Verb, kind: type[Exception]
) -> None:
    pair = ConnectionPair()
    region = pair.server.expose(BEFORE)
    grant = pair.server.grant(region, 20, 50)
    request = verb(pair.client, change(grant))
    expect_fine(pair)
    assert type(pair.client.error(request)) is kind
    assert pair.server.content(region.buffer) == BEFORE
    assert not pair.client.memory
    following = pair.client.get(grant)
    expect_fine(pair)
    assert pair.client.received(following) == BEFORE[20:70]


FORGED = {
    "number": lambda g: AccessBody(g.grant + 1, g.generation, g.token, 0, 5),
    "largest number": lambda g: AccessBody(2**63 - 1, g.generation, g.token, 0, 5),
    "token": lambda g: AccessBody(g.grant, g.generation, bytes(16), 0, 5),
    "beyond": lambda g: part(g, 46, 5),
    "far beyond": lambda g: part(g, REQUEST_BYTES_MAX, 1),
    "too long": lambda g: part(g, 0, 51),
}


@pytest.mark.rule("KVW-OS-03", "breaks")
@both_verbs
def test_access_that_was_not_granted(verb: Verb) -> None:
    """FAIL with ACCESS; nothing is read, nothing is written, payload goes nowhere."""
    for forged in FORGED.values():
        expect_refused(forged, verb, AccessDenied)


@pytest.mark.rule("KVW-OS-03", "breaks")
@pytest.mark.parametrize(("verb", "granted"), [(put, Access.READ), (get, Access.WRITE)])
def test_a_grant_for_the_other_direction(verb: Verb, granted: Access) -> None:
    """A put into memory that may be read, and a get of memory that may be written."""
    pair = ConnectionPair()
    region = pair.server.expose(BEFORE)
    request = verb(pair.client, pair.server.grant(region, access=granted))
    expect_fine(pair)
    expect_error(pair.client, request, AccessDenied)
    assert pair.server.content(region.buffer) == BEFORE


@pytest.mark.rule("KVW-DT-04", "breaks")
def test_a_put_that_arrives_damaged() -> None:
    """The side that has put hears why it failed."""
    pair = ConnectionPair()
    request = put_of(pair)
    pair.deliver(pair.client)
    header, body = pair.client.wire.popleft()
    pair.server.receive((header, b"\x01" + body[1:]))
    expect_fine(pair)
    expect_error(pair.client, request, IntegrityError)


@pytest.mark.rule("KVW-OS-01", "breaks")
@pytest.mark.parametrize("frame_type", [FrameType.PUT, FrameType.GET])
def test_nothing_to_move(frame_type: FrameType) -> None:
    """0 bytes are not asked for."""
    pair = ConnectionPair()
    grant = pair.server.grant(pair.server.expose(10))
    pair.client.forge(frame_type, part(grant, 0, 0), request=1)
    expect_broken(pair, pair.server, "KVW-OS-01")


# --- FIN


def put_of(pair: ConnectionPair, nbytes: int = 100) -> RequestRecord:
    region = pair.server.expose(nbytes)
    return pair.client.put(bytes(nbytes), pair.server.grant(region))


@pytest.mark.rule("KVW-OS-02", "breaks")
def test_done_when_it_cannot_be() -> None:
    """With another number, before all was sent, twice, or for a get."""
    for nbytes in (0, 99, 101, REQUEST_BYTES_MAX):
        pair = ConnectionPair()
        put_of(pair)
        pair.server.forge(FrameType.FIN, Fin(nbytes), request=1)
        expect_broken(pair, pair.client, "KVW-OS-02")
    for stalled in (True, False):
        pair = ConnectionPair()
        # Early, once, is all right; twice it is not.
        pair.client.stalled, pair.client.slow = stalled, True
        put_of(pair)
        for _ in range(2):
            pair.server.forge(FrameType.FIN, Fin(100), request=1)
        if stalled:
            pair.server.wire.pop()
        expect_broken(pair, pair.client, "KVW-OS-02")
    pair = ConnectionPair()
    pair.client.get(pair.server.grant(pair.server.expose(100)))
    pair.server.forge(FrameType.FIN, Fin(100), request=1)
    expect_broken(pair, pair.client, "KVW-OS-02")


@pytest.mark.rule("KVW-OS-02", "keeps")
def test_done_before_the_link_is_through() -> None:
    """It is kept until then: memory that a link reads is not free."""
    pair = ConnectionPair()
    pair.client.slow = True
    request = put_of(pair, LARGE)
    expect_fine(pair)
    assert request not in pair.client.done
    assert request.buffer in pair.client.memory
    for _ in range(4):
        pair.client.complete()
    assert pair.client.error(request) is None
    assert request.buffer in pair.client.freed


# --- ended by either side, at every point


def test_only_what_works_on_the_region_ends() -> None:
    """Another region, a message, and a get of our own go on."""
    pair = ConnectionPair()
    pair.server.stalled = True
    one, two = pair.server.expose(BEFORE), pair.server.expose(BEFORE)
    ends = pair.client.get(pair.server.grant(one))
    stays = pair.client.get(pair.server.grant(two))
    ours = pair.server.get(pair.client.grant(pair.client.expose(BEFORE)))
    pair.run()
    pair.server.revoke(one)
    pair.server.stalled = False
    expect_fine(pair)
    expect_error(pair.client, ends, StaleRegion)
    assert pair.client.received(stays) == BEFORE
    assert pair.server.received(ours) == BEFORE


@pytest.mark.rule("KVW-DT-04", "breaks")
def test_ten_thousand_bursts_of_damage() -> None:
    """Goal R2: up to 32 neighbouring bits in any state, anywhere in a payload."""
    chance = random.Random(2)
    whole = chance.randbytes(4096)
    check, as_number = checksum(memoryview(whole)), int.from_bytes(whole, "little")
    for _ in range(10_000):
        burst = chance.randrange(1, 2**32) << chance.randrange(8 * len(whole) - 31)
        damaged = (as_number ^ burst).to_bytes(len(whole), "little")
        assert checksum(memoryview(damaged)) != check
    for place in range(0, len(whole), 64):
        pair = ConnectionPair()
        request = pair.client.get(pair.server.grant(pair.server.expose(whole)))
        pair.deliver(pair.client)
        header, body = pair.server.wire.popleft()
        end = bytes([body[place] ^ 1 << chance.randrange(8)]) + body[place + 1 :]
        pair.client.receive((header, body[:place] + end))
        expect_fine(pair)
        expect_error(pair.client, request, IntegrityError)


@pytest.mark.rule("KVW-RQ-02", "breaks")
def test_numbers_of_puts_and_gets() -> None:
    """One after the other, whatever starts with them."""
    for numbers in [(2,), (3,), (1, 1), (1, 5), (0,)]:
        pair = ConnectionPair()
        grant = pair.server.grant(pair.server.expose(10))
        *good, wrong = numbers
        for number in good:
            pair.client.forge(FrameType.ANNOUNCE, Announce(bytes(8), 5), request=number)
        pair.client.forge(FrameType.GET, grant, request=wrong)
        expect_broken(pair, pair.server, "KVW-RQ-02" if wrong else "KVW-CN-02")
