"""Whatever bytes come, decoding them raises one of the errors that are expected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.wire.decode_errors import DECODE_ERRORS


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no type"),
        pytest.param(b"\x91" * 100_000, id="too deep"),
        pytest.param(b"\xa2\xff\xfe", id="no text"),
    ],
)
def test_what_cannot_be_read_is_one_of_them(raw: bytes) -> None:
    with pytest.raises(DECODE_ERRORS):
        msgspec.msgpack.decode(raw)


@given(st.binary(max_size=64), st.sampled_from([str, list[int], dict[str, Any]]))
def test_any_bytes_are_read_or_refused(raw: bytes, kind: type) -> None:
    try:
        value: object = msgspec.msgpack.decode(raw, type=kind)
    except DECODE_ERRORS:
        return
    assert value is not None
