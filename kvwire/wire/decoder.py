"""An incremental decoder: bytes in any pieces in, whole frames out.

Links split their own frames (they put payload where it belongs without a copy). This
decoder is for everything that works on bytes alone: golden transcripts, the fuzzers,
the hostile peer of the test-suite, tools that read a capture. It must agree with a
link on every frame boundary, for any segmentation, which is what the tests compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvwire.limits import HEADER_BYTES
from kvwire.wire.header import Header, decode_header


class Frame(NamedTuple):
    """One whole frame: its header decoded and raw, and everything behind it."""

    header: Header
    raw_header: bytes
    body: bytes


class Decoder:
    """Splits a byte stream into frames.

    Holds at most one header and one body, whose length the frame's type has bounded
    before the first byte of it is kept.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._header: Header | None = None
        self._raw_header = b""

    @property
    def wanted_bytes(self) -> int:
        """Bytes still missing for the header or body being read; at least 1."""
        target = HEADER_BYTES if self._header is None else self._header.length
        return target - len(self._pending)

    @property
    def in_frame(self) -> bool:
        """Whether an end of the stream here would cut a frame."""
        return self._header is not None or bool(self._pending)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take the next bytes; yield the frames they complete.

        Raises:
            ProtocolError: A header broke a rule; nothing after it can be read.
        """
        view = memoryview(data)
        while view or self._header_is_whole_frame():
            taken = view[: self.wanted_bytes]
            self._pending += taken  # bounded: CHUNK_BYTES_MAX
            view = view[len(taken) :]
            if self.wanted_bytes:
                return
            piece = bytes(self._pending)
            self._pending.clear()
            if self._header is None:
                self._raw_header = piece
                self._header = decode_header(piece)
            else:
                yield Frame(self._header, self._raw_header, piece)
                self._header = None

    def _header_is_whole_frame(self) -> bool:
        return self._header is not None and self._header.length == 0
