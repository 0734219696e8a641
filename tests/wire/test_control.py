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
from kvwire.errors import MalformedFrame
from kvwire.wire.control import (
    _BODIES,
    AccessBody,
    Body,
    Credit,
    Ping,
    Ready,
    decode_body,
    encode_body,
    narrowed,
)
from kvwire.wire.header import (
    FIRST_PAYLOAD_TYPE,
    HANDSHAKE_TYPES,
    FrameType,
)
from tests.support.debug import needs_asserts
from tests.wire.bodies import beyond, plain, values

CONTROL_TYPES = sorted(_BODIES)
every_type = pytest.mark.parametrize(
    "frame_type", CONTROL_TYPES, ids=lambda number: FrameType(number).name
)


def kind_of(frame_type: int) -> inspect.Type:
    return inspect.type_info(_BODIES[frame_type])


def test_every_control_frame_has_a_body() -> None:
    """All types between the handshake's fixed messages and the first payload."""
    others = {t for t in FrameType if t < FIRST_PAYLOAD_TYPE} - HANDSHAKE_TYPES
    assert set(CONTROL_TYPES) == others


@pytest.mark.rule("KVW-CT-01", "keeps")
@every_type
@given(data=st.data())
def test_what_is_written_is_read(frame_type: int, data: st.DataObject) -> None:
    """Over the whole range of every field; this also proves that each has one."""
    body = data.draw(values(kind_of(frame_type)))
    raw = encode_body(body)
    for view in (raw, bytearray(raw), memoryview(raw)):
        assert decode_body(frame_type, view) == body


@pytest.mark.rule("KVW-CT-01", "breaks")
@every_type
def test_one_step_outside_each_range(frame_type: int) -> None:
    """Every field of every body, each bound, and values of other types."""
    good = msgspec.msgpack.encode(plain(kind_of(frame_type)))
    assert isinstance(decode_body(frame_type, good), _BODIES[frame_type])
    for row in beyond(kind_of(frame_type)):
        with pytest.raises(MalformedFrame) as caught:
            decode_body(frame_type, msgspec.msgpack.encode(row))
        assert caught.value.rule == "KVW-CT-01", row
        assert FrameType(frame_type).name in str(caught.value)


@pytest.mark.rule("KVW-CT-01", "breaks")
@every_type
def test_truncated_and_continued(frame_type: int) -> None:
    """Cut at each byte, and with a byte more."""
    raw = msgspec.msgpack.encode(plain(kind_of(frame_type)))
    for wrong in (*(raw[:end] for end in range(len(raw))), raw + b"\0", raw + raw):
        with pytest.raises(MalformedFrame):
            decode_body(frame_type, wrong)


@pytest.mark.parametrize("body", [Ping(7), Ready(9), Credit(3, 5)])
def test_fields_of_a_newer_version_are_skipped(body: Body) -> None:
    """New fields go to the end, and an older reader does not mind them."""
    frame_type = next(
        number for number in CONTROL_TYPES if _BODIES[number] is type(body)
    )
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


@needs_asserts
def test_narrowed_is_for_our_own_mistakes() -> None:
    """The frame type has decided the class before."""
    assert narrowed(Ping(1), Ping) == Ping(1)
    with pytest.raises(AssertionError):
        narrowed(Ping(1), Ready)
