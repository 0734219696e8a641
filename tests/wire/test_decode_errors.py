"""Whatever bytes come, decoding them raises one of the errors that are expected."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvwire.wire.decode_errors import DECODE_ERRORS


@given(st.binary(max_size=64), st.sampled_from([str, list[int], dict[str, Any]]))
def test_any_bytes_are_read_or_refused(raw: bytes, kind: type) -> None:
    try:
        value: object = msgspec.msgpack.decode(raw, type=kind)
    except DECODE_ERRORS:
        return
    assert value is not None
