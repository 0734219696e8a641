"""Control bodies: round trips, and every field just outside its range.

Both are made from the types themselves, so a body that is added later is covered. What
the ranges have to be is written out here once more.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from kvwire import limits
from kvwire.errors import FrameTooLarge, MalformedFrame
from kvwire.wire.control import (
    _BODIES,
    AccessBody,
    Body,
    Ping,
    Ready,
    decode_body,
    encode_body,
    narrowed,
)
from kvwire.wire.header import (
    FIRST_PAYLOAD_TYPE,
    HANDSHAKE_TYPES,
    Flag,
    FrameType,
    decode_header,
    encode_header,
)
from tests.support.debug import needs_asserts
from tests.wire.bodies import beyond, longest, plain, values

CONTROL_TYPES = sorted(_BODIES)


def kind_of(frame_type: int) -> inspect.Type:
    return inspect.type_info(_BODIES[frame_type])


def test_every_control_frame_has_a_body() -> None:
    """All types between the handshake's fixed messages and the first payload."""
    others = {t for t in FrameType if t < FIRST_PAYLOAD_TYPE} - HANDSHAKE_TYPES
    assert set(CONTROL_TYPES) == others


@pytest.mark.rule("KVW-CT-01", "keeps")
@given(st.tuples(*(values(kind_of(frame_type)) for frame_type in CONTROL_TYPES)))
def test_what_is_written_is_read(bodies: tuple[Body, ...]) -> None:
    """Over the whole range of every field; this also proves that each has one."""
    for frame_type, body in zip(CONTROL_TYPES, bodies, strict=True):
        raw = encode_body(body)
        for view in (raw, bytearray(raw), memoryview(raw)):
            assert decode_body(frame_type, view) == body


BENT = (
    b"\xc1",  # the one byte that begins nothing
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
    b"\x91\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
    b"\x91" * 100_000,  # arrays in arrays
    b"\x93\x01\x02" + b"\x91" * 100_000,  # the same in a field nobody reads
    b"\x91\xa2\xff\xfe",  # text that is not UTF-8
    b"\xd6\xff\x00\x00\x00\x00",  # an extension: a time
    b"\x81\xa6number\x01",  # an object where an array belongs
)


@pytest.mark.rule("KVW-CT-01", "breaks")
@pytest.mark.parametrize("frame_type", CONTROL_TYPES)
def test_what_is_no_body(frame_type: int) -> None:
    """Each field a step out of each bound, cut bodies, and what msgpack can be.

    None of it is believed, and none of it allocates what it announces.
    """
    good = msgspec.msgpack.encode(plain(kind_of(frame_type)))
    assert isinstance(decode_body(frame_type, good), _BODIES[frame_type])
    cut = (good[:end] for end in range(len(good)))
    rows = map(msgspec.msgpack.encode, beyond(kind_of(frame_type)))
    for raw in (*rows, *cut, good + b"\0", good + good, *BENT):
        with pytest.raises(MalformedFrame) as caught:
            decode_body(frame_type, raw)
        assert caught.value.rule == "KVW-CT-01", raw
        assert FrameType(frame_type).name in str(caught.value)


def test_fields_of_a_newer_version_are_skipped() -> None:
    """New fields go to the end, and an older reader does not mind them."""
    for frame_type, body in ((FrameType.PING, Ping(7)), (FrameType.READY, Ready(9))):
        row = [*msgspec.to_builtins(body), "new", [1, {"a": b"b"}]]
        assert decode_body(frame_type, msgspec.msgpack.encode(row)) == body


def test_the_ranges_are_those_of_the_document() -> None:
    """What must never be wider by accident."""
    kind = inspect.type_info(AccessBody)
    assert isinstance(kind, inspect.StructType)
    access = {field.name: field.type for field in kind.fields}
    assert access["offset"] == inspect.IntType(ge=0, le=limits.REQUEST_BYTES_MAX)
    assert access["nbytes"] == inspect.IntType(ge=0, le=limits.REQUEST_BYTES_MAX)
    assert access["grant"] == inspect.IntType(ge=0, le=2**63 - 1)
    assert access["token"] == inspect.BytesType(min_length=16, max_length=16)


def test_the_longest_body_fits_its_frame() -> None:
    """With its seal; and where many lie in a queue, the bound is not much more.

    Of OFFER and CHOICE the frame bounds all fields together.
    """
    many = {FrameType.LANE_OPEN, FrameType.LANE_CLOSE, FrameType.LANE_DATA}
    for frame_type in set(CONTROL_TYPES) - {FrameType.OFFER, FrameType.CHOICE}:
        raw = msgspec.msgpack.encode(longest(kind_of(frame_type)))
        assert isinstance(decode_body(frame_type, raw), _BODIES[frame_type])
        length = len(raw) + limits.SEAL_BYTES
        assert decode_header(encode_header(frame_type, Flag.SEALED, 0, length)).length
        if frame_type in many:
            with pytest.raises(FrameTooLarge):
                decode_header(encode_header(frame_type, Flag.SEALED, 0, length + 512))


@needs_asserts
def test_narrowed_is_for_our_own_mistakes() -> None:
    """The frame type has decided the class before."""
    assert narrowed(Ping(1), Ping) == Ping(1)
    with pytest.raises(AssertionError):
        narrowed(Ping(1), Ready)
