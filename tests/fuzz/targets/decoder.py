"""Any bytes in any pieces: the same frames as in one piece, or the same broken rule."""

from __future__ import annotations

from kvwire.errors import MalformedFrame, ProtocolError
from kvwire.wire.control import _BODIES, decode_body
from kvwire.wire.decoder import Decoder, Frame
from tests.fuzz.reader import Reader

Outcome = tuple[list[Frame], str, bool]


def run(data: bytes) -> int:
    """The first byte says in which pieces the others come."""
    reader = Reader(data)
    size = reader.byte() + 1
    stream = data[1:]
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    whole = _decoded([stream])
    assert _decoded(pieces) == whole
    for frame in whole[0]:
        _read_body(frame)
    return 2 * len(stream)


def _decoded(pieces: list[bytes]) -> Outcome:
    decoder, frames = Decoder(), list[Frame]()
    try:
        for piece in pieces:
            for frame in decoder.feed(piece):
                assert len(frame.body) == frame.header.length
                frames.append(frame)
            assert decoder.wanted_bytes >= 1
    except ProtocolError as exc:
        return frames, exc.rule, False
    return frames, "", decoder.in_frame


def _read_body(frame: Frame) -> None:
    if frame.header.type not in _BODIES:
        return
    try:
        body = decode_body(frame.header.type, frame.body)
    except MalformedFrame:
        return
    assert isinstance(body, _BODIES[frame.header.type])
