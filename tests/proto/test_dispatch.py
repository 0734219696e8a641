"""Control frames with the numbers of their type; what the peer ends and why."""

from __future__ import annotations

import pytest

from kvwire.errors import ClosedOK, PeerError, UnexpectedFrame, WireCode
from kvwire.limits import REASON_CHARS_MAX
from kvwire.proto.dispatch import check_numbers
from kvwire.proto.records import RequestRecord
from kvwire.wire.control import Fail
from kvwire.wire.header import (
    FIRST_PAYLOAD_TYPE,
    HANDSHAKE_TYPES,
    Flag,
    FrameType,
    Header,
    decode_header,
    encode_header,
)
from tests.support.core_pair.peer import ConnectionPair, Peer


def header(
    frame_type: FrameType, request: int = 1, segment: int = 0, offset: int = 0
) -> Header:
    raw = encode_header(frame_type, Flag.CHECKED, 0, 1, request, segment, offset=offset)
    return decode_header(raw)


@pytest.mark.rule("KVW-CN-02", "keeps")
@pytest.mark.rule("KVW-CN-02", "breaks")
def test_the_numbers_that_a_frame_has() -> None:
    """Frames about requests name one, others none; and none is a part of payload."""
    in_handshake = HANDSHAKE_TYPES | {FrameType.OFFER, FrameType.CHOICE}
    for frame_type in set(FrameType) - in_handshake:
        if frame_type >= FIRST_PAYLOAD_TYPE:
            continue
        request = 0 if frame_type < FrameType.ANNOUNCE else 1
        check_numbers(header(frame_type, request))
        for wrong in (
            header(frame_type, 1 - request),
            header(frame_type, request, segment=1),
            header(frame_type, request, offset=1),
        ):
            with pytest.raises(UnexpectedFrame, match="KVW-CN-02"):
                check_numbers(wrong)


def get(end: Peer) -> RequestRecord:
    return end.get(end.grant(end.expose(5)))


def failed(code: int, *, met_by_peer: bool, reason: str = "") -> Exception | None:
    """How a request ends when the peer says FAIL."""
    pair = ConnectionPair()
    request = pair.client.open() if met_by_peer else get(pair.client)
    pair.server.forge(FrameType.FAIL, Fail(code, reason), request=request.wire_id)
    pair.deliver(pair.server)
    return pair.client.error(request)


def test_what_the_peer_says_when_it_ends_a_request() -> None:
    """Going away has met nothing; any other code without a class is the peer's."""
    for code in (WireCode.INTERNAL, WireCode.GOING_AWAY, WireCode.VERSION, 9999):
        assert type(failed(code, met_by_peer=False)) is PeerError
    assert type(failed(WireCode.GOING_AWAY, met_by_peer=True)) is ClosedOK
    assert type(failed(WireCode.INTERNAL, met_by_peer=True)) is PeerError


def test_the_words_of_a_peer_are_shown_and_steer_nothing() -> None:
    """All of them: they may name every field that differs."""
    reason = "\x1b[2J" + "x" * 100
    text = str(failed(WireCode.OTHER, met_by_peer=False, reason=reason))
    assert "\x1b" not in text
    assert "x" * 100 in text
    assert len(text) < REASON_CHARS_MAX + 100
