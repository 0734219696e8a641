"""An incremental decoder: bytes in any pieces in, whole frames out.

Links split their own frames (they put payload where it belongs without a copy). This
decoder is for everything that works on bytes alone: golden transcripts, the fuzzers,
the hostile peer of the test-suite, tools that read a capture. It must agree with a
link on every frame boundary, for any segmentation, which is what the tests compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvwire.errors import ProtocolError
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
        self._broken: ProtocolError | None = None

    @property
    def wanted_bytes(self) -> int:
        """Bytes still missing for the header or body being read."""
        target = HEADER_BYTES if self._header is None else self._header.length
        return target - len(self._pending)

    @property
    def in_frame(self) -> bool:
        """Whether an end of the stream here would cut a frame."""
        return self._header is not None or bool(self._pending)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take the next bytes; yield the frames they complete.

        They are taken as the iteration goes on, so iterate to its end.

        Raises:
            ProtocolError: A header broke a rule. Nothing after it can be read, so every
                later call raises the same.
        """
        if self._broken is not None:
            raise self._broken
        view = memoryview(data)
        while view or not self.wanted_bytes:
            taken = view[: self.wanted_bytes]
            self._pending += taken  # bounded: CHUNK_BYTES_MAX
            view = view[len(taken) :]
            if self.wanted_bytes:
                return
            piece = bytes(self._pending)
            self._pending.clear()
            if self._header is not None:
                frame = Frame(self._header, self._raw_header, piece)
                self._header = None
                yield frame
            else:
                self._header, self._raw_header = self._decode(piece), piece

    def _decode(self, raw: bytes) -> Header:
        try:
            return decode_header(raw)
        except ProtocolError as exc:
            self._broken = exc
            raise
