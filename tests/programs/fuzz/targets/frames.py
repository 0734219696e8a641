"""Any bytes in any pieces: the reader of tcp finds the frames a plain loop finds."""

from __future__ import annotations

from kvwire.errors import MalformedFrame, ProtocolError
from kvwire.limits import HEADER_BYTES, KIB
from kvwire.wire.control import _BODIES, decode_body
from kvwire.wire.header import (
    _BODY_BYTES,
    FIRST_PAYLOAD_TYPE,
    Flag,
    FrameType,
    decode_header,
    encode_header,
)
from tests.programs.fuzz.reader import Reader
from tests.support.splitter import Frame, Splitter

Outcome = tuple[list[Frame], str, bool]


# Begins no header: what follows is not the stream, but says what is in it.
BUILT = 0x80
_TYPES = tuple(FrameType)
_STREAM_BYTES_MAX = 16 * KIB
_PIECES_MAX = 1000


def run(data: bytes) -> int:
    """The first byte says in which pieces the stream comes."""
    size = data[0] * 41 + 1 if data else 1
    stream = data[1:]
    if stream and stream[0] >= BUILT:
        stream = _built(Reader(stream[1:]))
        size = max(size, len(stream) // _PIECES_MAX)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    plain = _plain(stream)
    assert _read([stream], len(stream)) == plain
    assert _read(pieces, len(stream)) == plain
    for frame in plain[0]:
        _read_body(frame)
    return 3 * len(stream)


def _built(reader: Reader) -> bytes:
    """Frames with right headers, up to some bytes that are none."""
    stream = b""
    while reader and len(stream) < _STREAM_BYTES_MAX:
        number, much = reader.byte(), reader.byte()
        if number >= 0xF0:
            stream += reader.take(much)
            continue
        kind = _TYPES[number % len(_TYPES)]
        low, high = _BODY_BYTES[kind]
        length = min(max(much * 64, low), high)
        flags = Flag.CHECKED if kind < FIRST_PAYLOAD_TYPE else 0
        header = encode_header(kind, flags, 0, length, offset=number)
        stream += header + (bytes([number, much, 1]) * length)[:length]
    return stream


def _plain(stream: bytes) -> Outcome:
    """Frames, the rule that a header broke, and whether the end cuts a frame."""
    frames: list[Frame] = []
    at = 0
    while (body := at + HEADER_BYTES) <= len(stream):
        raw = stream[at:body]
        try:
            header = decode_header(raw)
        except ProtocolError as exc:
            return frames, exc.rule, False
        if body + header.length > len(stream):
            break
        at = body + header.length
        frames.append(Frame(header, raw, stream[body:at]))
    return frames, "", at < len(stream)


def _read(pieces: list[bytes], stream_bytes: int) -> Outcome:
    # A body longer than all there is never becomes whole, and need not be kept.
    splitter = Splitter(stream_bytes)
    frames = [frame for piece in pieces for frame in splitter.feed(piece)]
    if splitter.broken is not None:
        return frames, splitter.broken.rule, False
    return frames, "", splitter.in_frame


def _read_body(frame: Frame) -> None:
    if frame.header.type not in _BODIES:
        return
    try:
        body = decode_body(frame.header.type, frame.body)
    except MalformedFrame:
        return
    assert isinstance(body, _BODIES[frame.header.type])
