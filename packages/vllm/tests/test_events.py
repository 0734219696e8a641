"""Events of streams, however their lines end and wherever they are cut."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvwire_vllm.proxy.events import EventReader, data_of, fields_of

ENDS = pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
LINES = [
    b": a comment",
    b"event: x",
    b'data: {"a":',
    b"data:1}",
    b"",
    b"data: [DONE]",
    b"",
]


async def read(content: bytes, size: int) -> list[bytes]:
    """What a reader makes of a stream that comes in parts of this size."""

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(content), size):
            yield content[at : at + size]

    return [event async for event in EventReader(parts())]


@ENDS
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_have_any_end_of_lines(end: bytes, size: int) -> None:
    content = b"".join(line + end for line in (*LINES, b""))
    events = await read(content, size)
    assert b"".join(events) == content
    assert [data for one in events if (data := data_of(one))] == [
        b'{"a":\n1}',
        b"[DONE]",
    ]
    assert [one for one in map(fields_of, events) if one] == [{"a": 1}]


@ENDS
async def test_a_stream_that_is_cut_keeps_what_came(end: bytes) -> None:
    content = b"data: 1" + end + end + b"data: 2"
    assert await read(content, 4) == [content[:-7], b"data: 2"]
    assert await read(b"", 4) == []
