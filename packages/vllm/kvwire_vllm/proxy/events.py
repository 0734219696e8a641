"""Streams of events (SSE), as engines write them and as gateways rewrite them.

A line ends with LF, CRLF or CR, and an empty line ends an event. An event may have
comments and fields beside its data.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from kvwire.spi import DECODE_ERRORS
from kvwire_vllm.proxy.client import EngineFailed
from kvwire_vllm.proxy.limits import PROXY_EVENT_BYTES_MAX

EVENTS: Final = "text/event-stream"
# CR and LF that arrive in two parts are one end of a line.
_LINE: Final = rb"(?:\r\n|\n|\r(?!\n))"
_END: Final = re.compile(_LINE + _LINE)
_LINES: Final = re.compile(_LINE)
_END_BYTES_MAX: Final = 4
# The data of a stream's last event.
_DONE: Final = b"[DONE]"


class EventReader(AsyncIterator[bytes]):
    """Splits a stream into events; each event keeps the empty line at its end.

    The last one has no such line if the stream was cut.

    Raises:
        EngineFailed: An event is too long, or the engine broke off.
    """

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts
        self._read = b""  # bounded: PROXY_EVENT_BYTES_MAX
        self._searched = 0

    async def __anext__(self) -> bytes:
        """Return the next event.

        Cancel safety: safe, bytes that were read are kept.
        """
        while (end := _END.search(self._read, self._searched)) is None:
            # The end may have begun in the bytes that were read.
            self._searched = max(0, len(self._read) - _END_BYTES_MAX)
            if len(self._read) > PROXY_EVENT_BYTES_MAX:
                why = f"an event has more than {PROXY_EVENT_BYTES_MAX} bytes"
                raise EngineFailed(None, why)
            part = await anext(self._parts, None)
            if part is None:
                if not self._read:
                    raise StopAsyncIteration
                return self.rest()
            self._read += part
        event = self._read[: end.end()]
        self._read = self._read[end.end() :]
        self._searched = 0
        return event

    def rest(self) -> bytes:
        """Take the bytes that were read after the last returned event."""
        rest = self._read
        self._read = b""
        self._searched = 0
        return rest


def data_of(event: bytes) -> bytes:
    """Return the data of an event, without its comments and other fields."""
    lines = [line for line in _LINES.split(event) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def fields_of(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object in an event; None if its data is anything else."""
    try:
        return msgspec.json.decode(data_of(event), type=dict[str, Any])
    except DECODE_ERRORS:
        return None


def ends(tail: bytes) -> bool:
    """Return whether the last bytes of a stream mark its end."""
    return tail.rstrip().endswith(_DONE)


def written(fields: dict[str, Any]) -> bytes:
    """Return an event with a JSON object."""
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
