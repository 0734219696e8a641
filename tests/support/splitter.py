"""Bytes in any pieces in, whole frames out: by the reader that links of tcp use."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvwire.backend import Landing, Link
from kvwire.errors import ProtocolError
from kvwire.limits import CHUNK_BYTES_MAX
from kvwire.wire.header import Header, decode_header
from kvwire_tcp.reader import FrameReader


class Frame(NamedTuple):
    """One whole frame: its header decoded and raw, and everything behind it."""

    header: Header
    raw_header: bytes
    body: bytes


class Splitter:
    """Splits a byte stream into frames."""

    def __init__(self, body_bytes_max: int = CHUNK_BYTES_MAX) -> None:
        self._body_bytes_max = body_bytes_max
        self._wire: Any = _Memory()
        self._frames: list[Frame] = []
        nowhere: Any = None  # the link is only passed on
        self._reader = FrameReader(nowhere, self)
        self.broken: ProtocolError | None = None

    @property
    def in_frame(self) -> bool:
        """Whether an end of the stream here would cut a frame."""
        return bool(self._reader.position)

    def feed(self, data: bytes) -> list[Frame]:
        """Takes the next bytes; returns the frames that they complete.

        Frames before a header that breaks a rule are returned; see ``broken``.
        """
        self._wire.data = memoryview(data)
        while self.broken is None and self._wire.data:
            try:
                self._reader.deliver(self._reader.receive(self._wire))
            except ProtocolError as exc:
                self.broken = exc
        frames, self._frames = self._frames, []
        return frames

    def header_received(self, link: Link, header: memoryview) -> Landing:
        return _Body(bytes(header), self._body_bytes_max)

    def body_received(self, link: Link, landing: Landing) -> None:
        assert isinstance(landing, _Body)
        body = b"" if landing.payload is None else bytes(landing.memory)
        self._frames.append(Frame(landing.header, landing.raw, body))


class _Body(Landing):
    def __init__(self, raw: bytes, body_bytes_max: int) -> None:
        self.raw, self.header = raw, decode_header(raw)
        length = self.header.length
        kept = length <= body_bytes_max
        self.memory = bytearray(length if kept else 0)
        super().__init__(length, memoryview(self.memory) if kept else None)


class _Memory:
    """Bytes where a wire has its socket."""

    more = False
    data = memoryview(b"")

    def recv_into(self, target: memoryview) -> int:
        count = min(len(target), len(self.data))
        target[:count] = self.data[:count]
        self.data = self.data[count:]
        return count

    def recv_two(self, target: memoryview, behind: memoryview) -> int:
        return self.recv_into(target) + self.recv_into(behind)
