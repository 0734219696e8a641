"""Windows in the core: what was asked is reported once, and answered by the rules."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
import pytest

from kvwire.endpoint.windows.fields import decode_memory, encode_memory, unpacked
from kvwire.endpoint.windows.map import geometry_of_pools, placed, spans_of
from kvwire.errors import (
    AccessDenied,
    ProtocolError,
    RequestCancelled,
    StaleRegion,
    UsageError,
)
from kvwire.limits import WINDOW_DATA_BYTES_MAX, WINDOW_GET_BYTES_MAX
from kvwire.memory.checksum import checksum
from kvwire.proto.events import (
    Event,
    WindowAsked,
    WindowClosed,
    WindowLeft,
    WindowMemoryOffered,
    WindowRead,
    WindowReadTogether,
    WindowSent,
    WindowViewed,
)
from kvwire.proto.records import RequestRecord
from kvwire.proto.windows import WINDOWS_OPEN_MAX
from kvwire.types import RequestId
from kvwire.wire.control import (
    WindowClose,
    WindowGet,
    WindowGot,
    WindowMemoryBody,
    WindowOpened,
    WindowViewBody,
)
from kvwire.wire.header import FrameType
from tests.proto.moving import expect_broken, expect_error, expect_fine
from tests.support.caches import Filled
from tests.support.core_pair.peer import ConnectionPair, Peer

E = TypeVar("E", bound=Event)
SERIAL = bytes(16)
DATA = bytes(range(100))


def taken(peer: Peer, kind: type[E]) -> E:
    """The one event of this kind, which is removed."""
    (found,) = [event for event in peer.events if isinstance(event, kind)]
    peer.events.remove(found)
    return found


def asks(blocks: int = 1, nbytes: int = len(DATA), *, window: int = 1) -> WindowGet:
    return WindowGet(window, 0, nbytes, (blocks,), bytes(4 * blocks), bytes(8 * blocks))


def opened(pair: ConnectionPair) -> int:
    """The number of a window of the server that the client has opened."""
    client, server = pair.client, pair.server
    request = client.core.open_window("kv", None)
    pair.run()
    number = server.core.windows.number()
    answer = WindowOpened(number, SERIAL, b"")
    server.core.windows.answer(taken(server, WindowAsked).wire_id, answer)
    expect_fine(pair)
    assert client.error(request) is None
    assert request.answer == answer
    return number


def served(pair: ConnectionPair, stale: bytes = b"") -> RequestRecord:
    """A get whose bytes have left, with its last frame."""
    request = pair.client.read(asks())
    pair.run()
    event = taken(pair.server, WindowRead)
    pair.server.core.windows.serve(event.request, pair.server.lend(DATA))
    pair.server.collect()
    assert taken(pair.server, WindowSent).request is event.request
    pair.server.core.finish_read(event.request, stale, sent=True)
    expect_fine(pair)
    return request


@pytest.mark.rule("KVW-WN-01", "KVW-WN-02", "KVW-WN-03", "KVW-WN-05", "keeps")
def test_a_get() -> None:
    """The bytes land, and the last frame ends it on both sides; no memory stays."""
    pair = ConnectionPair()
    opened(pair)
    for stale in (b"", b"\x01"):
        request = served(pair, stale)
        assert pair.client.received(request) == DATA
        assert isinstance(request.answer, WindowGot)
        assert request.answer.stale == stale
    assert not pair.client.memory
    assert not pair.server.memory


def asks_together(blocks: int = 1, nbytes: int = len(DATA)) -> WindowGet:
    return msgspec.structs.replace(asks(blocks, nbytes), together=True)


def get_together(pair: ConnectionPair) -> tuple[RequestRecord, RequestId]:
    """A small get, and its number at the owner, who was asked."""
    request = pair.client.core.read_window(None, asks_together(), None)
    pair.run()
    return request, taken(pair.server, WindowReadTogether).wire_id


def send_data(pair: ConnectionPair, wire_id: RequestId, check: int | None) -> None:
    pair.server.send_data(wire_id, memoryview(DATA), check)
    expect_fine(pair)


@pytest.mark.rule("KVW-WN-08", "keeps")
def test_a_small_get() -> None:
    """All bytes come at once; or the reason why they do not."""
    pair = ConnectionPair()
    opened(pair)
    for check, damaged in (
        (None, False),
        (checksum(memoryview(DATA)), False),
        (1, True),
    ):
        request, wire_id = get_together(pair)
        send_data(pair, wire_id, check)
        assert request.answer == DATA
        assert request.damaged == damaged
        assert request.over
    request, wire_id = get_together(pair)
    pair.server.core.windows.withhold(wire_id, b"\x01")
    expect_fine(pair)
    assert request.answer == WindowGot(sent=False, stale=b"\x01")
    request, wire_id = get_together(pair)
    pair.server.core.windows.refuse(wire_id, StaleRegion("closed"))
    expect_fine(pair)
    expect_error(pair.client, request, StaleRegion)


@pytest.mark.rule("KVW-WN-08", "keeps")
def test_a_small_get_that_is_cancelled() -> None:
    """What comes is dropped."""
    pair = ConnectionPair()
    opened(pair)
    request, wire_id = get_together(pair)
    pair.client.cancel(request)
    send_data(pair, wire_id, None)
    expect_error(pair.client, request, RequestCancelled)
    assert request.answer is None


def test_a_small_get_that_is_cancelled_in_its_frame() -> None:
    """The header has come, and the body ends nothing."""
    pair = ConnectionPair()
    opened(pair)
    request, wire_id = get_together(pair)
    pair.server.send_data(wire_id, memoryview(DATA), None)
    header, body = pair.server.wire.popleft()
    arrival = pair.client.header(header)
    assert arrival is not None
    pair.client.cancel(request)
    pair.client.body(arrival, body)
    expect_fine(pair)
    expect_error(pair.client, request, RequestCancelled)


def test_gets_of_a_window_that_its_reader_has_closed() -> None:
    """Small or large, they are refused."""
    pair = ConnectionPair()
    number = opened(pair)
    pair.client.core.windows.close(number)
    pair.client.collect()
    small = pair.client.core.read_window(None, asks_together(), None)
    large = pair.client.read(asks())
    expect_fine(pair)
    for request in (small, large):
        expect_error(pair.client, request, StaleRegion)


def test_an_opening_that_is_cancelled() -> None:
    """The answer comes too late: the window is closed again."""
    pair = ConnectionPair()
    request = pair.client.core.open_window("kv", None)
    pair.run()
    pair.client.cancel(request)
    number = pair.server.core.windows.number()
    answer = WindowOpened(number, SERIAL, b"")
    pair.server.core.windows.answer(taken(pair.server, WindowAsked).wire_id, answer)
    expect_fine(pair)
    assert taken(pair.server, WindowLeft) == WindowLeft(window=number)


def test_a_lane_that_comes_up_later() -> None:
    """It is reported to the reader, unless it has closed the window."""
    pair = ConnectionPair()
    number = opened(pair)
    body = WindowMemoryBody(number, 1, b"memory", b"access")
    pair.server.core.windows.report(body)
    expect_fine(pair)
    assert taken(pair.client, WindowMemoryOffered).body == body
    pair.server.forge(
        FrameType.WINDOW_MEMORY, WindowMemoryBody(number + 1, 1, b"", b"")
    )
    expect_fine(pair)
    assert not any(isinstance(e, WindowMemoryOffered) for e in pair.client.events)


def test_a_last_frame_before_the_last_bytes() -> None:
    """A lane may bring the bytes later than the control link its frame."""
    pair = ConnectionPair()
    opened(pair)
    pair.server.stalled = True
    request = pair.client.read(asks())
    pair.run()
    event = taken(pair.server, WindowRead)
    pair.server.core.windows.serve(event.request, pair.server.lend(DATA))
    pair.server.forge(
        FrameType.WINDOW_GOT, WindowGot(sent=True), request=request.wire_id
    )
    pair.run()
    assert not request.over
    pair.server.stalled = False
    expect_fine(pair)
    assert pair.client.received(request) == DATA
    late = WindowGot(sent=True)
    pair.server.forge(FrameType.WINDOW_GOT, late, request=request.wire_id)
    expect_fine(pair)


def test_more_windows_than_a_peer_may_open() -> None:
    pair = ConnectionPair()
    for _ in range(WINDOWS_OPEN_MAX):
        pair.server.core.windows.number()
    with pytest.raises(UsageError, match="close some"):
        pair.server.core.windows.number()


@pytest.mark.rule("KVW-WN-08", "breaks")
@pytest.mark.parametrize("wrong", ["size", "not asked", "twice", "as chunks", "got"])
def test_data_that_was_not_asked_for(wrong: str) -> None:
    pair = ConnectionPair()
    opened(pair)
    together = wrong != "not asked"
    if together:
        request, _ = get_together(pair)
    else:
        request = pair.client.read(asks())
    data = DATA[:-1] if wrong == "size" else DATA
    server, number = pair.server, request.wire_id
    rule = "KVW-WN-08"
    if wrong == "got":
        server.forge(FrameType.WINDOW_GOT, WindowGot(sent=True), request=number)
    elif wrong == "as chunks":
        server.forge_payload(FrameType.DATA, data, request=number)
        rule = "KVW-DT-01"
    else:
        server.forge_payload(FrameType.WINDOW_DATA, data, request=number)
    if wrong == "twice":
        pair.client.header(server.wire.popleft()[0])
        server.forge_payload(FrameType.WINDOW_DATA, data, request=number)
    expect_broken(pair, pair.client, rule)


@pytest.mark.rule("KVW-WN-04", "keeps")
def test_a_get_of_blocks_that_were_withdrawn() -> None:
    """Nothing is sent but the reason."""
    pair = ConnectionPair()
    opened(pair)
    request = pair.client.read(asks())
    pair.run()
    event = taken(pair.server, WindowRead)
    pair.server.core.finish_read(event.request, b"\x01", sent=False)
    expect_fine(pair)
    assert pair.client.error(request) is None
    assert request.moved == 0
    assert not pair.client.memory


def test_a_window_that_is_not_there() -> None:
    pair = ConnectionPair()
    request = pair.client.core.open_window("kv", None)
    pair.run()
    pair.server.core.windows.answer(taken(pair.server, WindowAsked).wire_id, "none")
    expect_fine(pair)
    expect_error(pair.client, request, AccessDenied)


def test_a_get_that_is_cancelled() -> None:
    """The owner stops, and both sides get their memory back."""
    pair = ConnectionPair()
    opened(pair)
    pair.server.stalled = True
    request = pair.client.read(asks())
    pair.run()
    event = taken(pair.server, WindowRead)
    pair.server.core.windows.serve(event.request, pair.server.lend(DATA))
    pair.server.collect()
    pair.client.cancel(request)
    expect_fine(pair)
    expect_error(pair.client, request, RequestCancelled)
    assert event.request.over
    pair.server.core.finish_read(event.request, b"", sent=True)  # late: nothing
    expect_fine(pair)
    assert not pair.client.memory
    assert not pair.server.memory


def test_a_close_waits_for_a_get_and_no_longer() -> None:
    """Its last frame is followed by CLOSE."""
    pair = ConnectionPair()
    opened(pair)
    request = pair.client.read(asks())
    pair.run()
    event = taken(pair.server, WindowRead)
    pair.server.close()
    pair.server.core.windows.serve(event.request, pair.server.lend(DATA))
    pair.server.collect()
    pair.server.core.finish_read(event.request, b"", sent=True)
    pair.run()
    assert pair.client.error(request) is None
    assert pair.server.ended is not None


def test_damage_waits_for_the_last_frame() -> None:
    """The blocks may have been written to since."""
    pair = ConnectionPair()
    opened(pair)
    request = pair.client.read(asks())
    pair.run()
    event = taken(pair.server, WindowRead)
    pair.server.core.windows.serve(event.request, pair.server.lend(DATA))
    pair.server.collect()
    header, body = pair.server.wire.popleft()
    pair.client.receive((header, b"\xff" + body[1:]))
    pair.server.core.finish_read(event.request, b"\x01", sent=True)
    expect_fine(pair)
    assert pair.client.error(request) is None
    assert request.damaged


@pytest.mark.rule("KVW-WN-06", "keeps")
def test_views_and_closing() -> None:
    """Each side hears of the other's end of a window once."""
    pair = ConnectionPair()
    number = opened(pair)
    pair.client.core.windows.report(WindowViewBody(number, 0, b"geometry"))
    pair.run()
    assert taken(pair.server, WindowViewed).body.geometry == b"geometry"
    pair.server.core.windows.hide(number)
    pair.run()
    assert taken(pair.client, WindowClosed) == WindowClosed(window=number)
    pair.client.core.windows.close(number)
    expect_fine(pair)
    assert taken(pair.server, WindowLeft) == WindowLeft(window=number)
    late = pair.client.read(asks())
    expect_fine(pair)
    expect_error(pair.client, late, StaleRegion)
    pair.client.forge(FrameType.WINDOW_CLOSE, WindowClose(number, mine=False))
    pair.server.forge(FrameType.WINDOW_CLOSE, WindowClose(number, mine=True))
    expect_fine(pair)
    assert not any(isinstance(e, WindowLeft) for e in pair.server.events)


# --- rules that are broken ------------------------------------------------------------


@pytest.mark.rule("KVW-WN-01", "breaks")
def test_an_answer_to_something_else() -> None:
    pair = ConnectionPair()
    pair.client.recv(1)
    pair.client.send(2, bytes(1 << 20))
    pair.run()
    pair.server.forge(FrameType.WINDOW_OPENED, WindowOpened(1, SERIAL, b""), request=1)
    expect_broken(pair, pair.client, "KVW-WN-01")


@pytest.mark.rule("KVW-WN-02", "breaks")
def test_a_number_in_use() -> None:
    """Or more windows than may be open."""
    pair = ConnectionPair()
    number = opened(pair)
    pair.client.core.open_window("other", None)
    pair.run()
    wire_id = taken(pair.server, WindowAsked).wire_id
    pair.server.forge(
        FrameType.WINDOW_OPENED, WindowOpened(number, SERIAL, b""), request=wire_id
    )
    expect_broken(pair, pair.client, "KVW-WN-02")
    pair = ConnectionPair()
    for _ in range(WINDOWS_OPEN_MAX):
        opened(pair)
    pair.client.core.open_window("more", None)
    pair.run()
    wire_id = taken(pair.server, WindowAsked).wire_id
    more = WindowOpened(WINDOWS_OPEN_MAX + 1, SERIAL, b"")
    pair.server.forge(FrameType.WINDOW_OPENED, more, request=wire_id)
    expect_broken(pair, pair.client, "KVW-WN-02")


@pytest.mark.rule("KVW-WN-03", "breaks")
def test_a_last_frame_that_is_none() -> None:
    """For another request, twice, or with too few bits."""
    pair = ConnectionPair()
    pair.client.send(2, bytes(1 << 20))
    pair.server.forge(FrameType.WINDOW_GOT, WindowGot(sent=True), request=1)
    expect_broken(pair, pair.client, "KVW-WN-03")
    pair = ConnectionPair()
    opened(pair)
    request = pair.client.read(asks())
    for _ in range(2):
        pair.server.forge(
            FrameType.WINDOW_GOT, WindowGot(sent=True), request=request.wire_id
        )
    expect_broken(pair, pair.client, "KVW-WN-03")
    with pytest.raises(ProtocolError) as caught:
        unpacked(b"\x01", 9)
    assert caught.value.rule == "KVW-WN-03"


@pytest.mark.rule("KVW-WN-04", "breaks")
def test_bytes_of_a_get_that_has_none() -> None:
    pair = ConnectionPair()
    opened(pair)
    request = pair.client.read(asks(nbytes=2 * 65_536))
    pair.run()
    pair.server.forge_payload(FrameType.DATA, bytes(65_536), request=request.wire_id)
    pair.server.forge(
        FrameType.WINDOW_GOT, WindowGot(sent=False), request=request.wire_id
    )
    expect_broken(pair, pair.client, "KVW-WN-04")


WRONG_LISTS = {
    "more entries": WindowGet(1, 0, 5, (1,), bytes(8), bytes(8)),
    "more generations": WindowGet(1, 0, 5, (1,), bytes(4), bytes(16)),
    "other counts": WindowGet(1, 0, 5, (1, 1), bytes(4), bytes(8)),
    "too many bytes together": asks_together(nbytes=WINDOW_DATA_BYTES_MAX + 1),
    "too many bytes": asks(2, WINDOW_GET_BYTES_MAX + 1),
}


@pytest.mark.rule("KVW-WN-05", "breaks")
@pytest.mark.parametrize("body", WRONG_LISTS.values(), ids=WRONG_LISTS)
def test_lists_that_differ(body: WindowGet) -> None:
    pair = ConnectionPair()
    opened(pair)
    pair.client.forge(FrameType.WINDOW_GET, body, request=3)
    expect_broken(pair, pair.server, "KVW-WN-05")


@pytest.mark.rule("KVW-WN-06", "breaks")
def test_a_window_that_never_was() -> None:
    for frame_type, body in (
        (FrameType.WINDOW_VIEW, WindowViewBody(2, 0, b"")),
        (FrameType.WINDOW_CLOSE, WindowClose(2, mine=False)),
    ):
        pair = ConnectionPair()
        opened(pair)
        pair.client.forge(frame_type, body)
        expect_broken(pair, pair.server, "KVW-WN-06")


@pytest.mark.rule("KVW-WN-07", "keeps")
@pytest.mark.rule("KVW-WN-07", "breaks")
def test_the_memory_of_a_window() -> None:
    """What the owner describes is what the reader reads; anything else is refused."""
    source = Filled(seed=1)
    cache = source.cache
    geometry = geometry_of_pools(cache)
    data = encode_memory(4096, placed(cache))
    assert data is not None
    memory, groups = decode_memory(data, geometry)
    assert memory.table == (4096, 8 * source.blocks)
    assert memory.spans == spans_of(geometry, placed(cache))
    assert sum(nbytes for _, nbytes in memory.spans) == sum(
        tensor.nbytes for tensor in source.tensors
    )
    (group,) = groups
    assert np.array_equal(group.bases, cache.groups["kv"].bases)
    place = placed(cache)[0]
    wrong = (
        data[:-1],
        data + b"\x00",
        encode_memory(4096, ()),
        encode_memory(4096, (place._replace(bases=place.bases[1:]),)),
        encode_memory(4096, (place._replace(bases=-place.bases),)),
        encode_memory(4096, (place._replace(strides=(2**61, 1, 1, 1)),)),
    )
    for described in wrong:
        assert described is not None
        with pytest.raises(ProtocolError) as caught:
            decode_memory(described, geometry)
        assert caught.value.rule == "KVW-WN-07"
