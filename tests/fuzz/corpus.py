"""The committed inputs of each target, and the ones that golden transcripts give.

``python -m tests.fuzz.corpus`` adds the latter; what a fuzzer has found is added with
``python -m tests.fuzz --keep``.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvwire.grant import Grant
from kvwire.limits import HEADER_BYTES
from kvwire.testing.transcripts import Transcript
from kvwire.types import Access, Role
from tests.fuzz.guard import Run
from tests.support.tree import ROOT

TARGETS: Final = ("header", "decoder", "handshake", "connection", "grants")
FOLDER: Final = Path(__file__).with_name("inputs")
_GOLDEN: Final = ROOT / "tests" / "testing" / "golden"
# The choice of tests/fuzz/targets/connection.py that feeds raw bytes to the server.
_RAW_TO_SERVER: Final = 19 << 1
_DELIVER: Final = 0


def target(name: str) -> Run:
    """The function that a target is."""
    run: Run = importlib.import_module(f"tests.fuzz.targets.{name}").run
    return run


def inputs(name: str) -> list[bytes]:
    """The committed inputs of a target, in the order of their names."""
    return [path.read_bytes() for path in sorted((FOLDER / name).iterdir())]


def keep(name: str, data: bytes) -> None:
    """Add an input, named after its content."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def seeds(name: str) -> Iterator[bytes]:
    """Inputs of a target that golden transcripts give."""
    transcripts = [Transcript.parse(p.read_text()) for p in sorted(_GOLDEN.iterdir())]
    match name:
        case "header":
            yield from _headers(transcripts)
        case "decoder":
            for transcript in transcripts:
                yield b"\x1f" + transcript.sent_by(Role.CLIENT)[-500:]
        case "handshake":
            yield from _handshakes()
        case "connection":
            yield from _connections(transcripts)
        case _:
            yield from _grants()


def _headers(transcripts: list[Transcript]) -> Iterator[bytes]:
    seen: set[int] = set()
    for transcript in transcripts:
        for step in transcript.steps:
            for _, (header, _) in step.frames:
                if header[0] not in seen:
                    seen.add(header[0])
                    yield header[:HEADER_BYTES]


def _handshakes() -> Iterator[bytes]:
    """Both roles and modes: all goes well, a frame is changed, one is forged."""
    for options in range(4):
        yield bytes([options, *[0] * 8])
        yield bytes([options, 0, 2, 3, 40, 1, 0, 0])
        yield bytes([options, 0, 0, 4, 3, 2, 5, *b"abcde", 1, 0])
        yield bytes([options, 0, 5, 5, 0, 3, 4, *b"abcd"])


def _connections(transcripts: list[Transcript]) -> Iterator[bytes]:
    """What a client has sent after its handshake, as raw bytes to the server."""
    for transcript in transcripts:
        if "loopback" not in transcript.title or len(transcript.steps) < 2:
            continue
        data = bytearray([0])
        for step in transcript.steps[1:]:
            sent = step.sent_by(Role.CLIENT)[:255]
            data += bytes([_RAW_TO_SERVER, len(sent)]) + sent + bytes([_DELIVER, 7])
        yield bytes(data[:1000])


def _grants() -> Iterator[bytes]:
    yield Grant(
        access=Access.READWRITE,
        connection=bytes(16),
        grant=1,
        generation=1,
        token=bytes(16),
        offset=5,
        nbytes=10,
    ).to_bytes()
    for step in range(6):
        yield bytes(
            [0, 2, 100, 1, 0, 0, 10, 50, 2, step, 0, 0, 5, 5, 0, 3, 0, 4, 0, 0, 5]
        )


if __name__ == "__main__":
    for name in sys.argv[1:] or TARGETS:
        for data in seeds(name):
            keep(name, data)
