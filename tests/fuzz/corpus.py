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
from typing import Any, Final

import msgspec
import numpy as np

from kvwire.kv.codecs.entry import HEAD_BYTES, encode_entry
from kvwire.kv.codecs.registry import CODECS
from kvwire.kv.fragments import Fragments
from kvwire.kv.layout import AXES
from kvwire.kv.spec import KVSpec
from kvwire.limits import HEADER_BYTES
from kvwire.store.server import messages as requests
from kvwire.store.server.messages import (
    Find,
    Found,
    Get,
    Names,
    NamespaceText,
    Put,
    Stats,
    StoreDone,
    StoreHello,
    Welcome,
)
from kvwire.transfers.description import TransferOffer
from kvwire.types import Access, Grant, Role
from kvwire_local.descriptor import PlaceKind, encode, encode_piece
from kvwire_local.host import Host
from kvwire_nccl.bootstrap import NcclBootstrap
from kvwire_tcp.preamble import make_preamble
from kvwire_ucx.bootstrap import UcxBootstrap
from kvwire_ucx.library import Version
from kvwire_ucx.pieces import descriptor
from tests.fuzz.guard import Run
from tests.fuzz.targets.codecs import FORMS
from tests.fuzz.targets.frames import BUILT
from tests.support.core_pair.transcripts import Transcript
from tests.support.tree import ROOT

TARGETS: Final = (
    *("header", "frames", "handshake", "connection", "grants"),
    *("plans", "backends", "store", "codecs"),
)
FOLDER: Final = Path(__file__).with_name("inputs")
_GOLDEN: Final = ROOT / "tests" / "support" / "core_pair" / "golden"
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
        case "frames":
            yield from _streams(transcripts)
        case "handshake":
            yield from _handshakes()
        case "connection":
            yield from _connections(transcripts)
        case "plans":
            yield from _plans()
        case "backends":
            yield from _backends()
        case "store":
            yield from _store()
        case "codecs":
            yield from _codecs()
        case _:
            yield from _grants()


def _streams(transcripts: list[Transcript]) -> Iterator[bytes]:
    """What was said after a handshake, and frames of all types and sizes, in pieces."""
    for pieces, transcript in enumerate(transcripts):
        said = b"".join(step.sent_by(Role.CLIENT) for step in transcript.steps[1:])
        yield bytes([pieces % 7]) + said[:1000]
    for pieces in (0, 1, 5, 50, 199, 255):
        for step in (1, 5, 77):
            frames = bytes(step * at % 256 for at in range(40))
            yield bytes([pieces, BUILT]) + frames


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


def _plans() -> Iterator[bytes]:
    """Descriptions as they come, and ones that are nearly right; then some boxes."""
    spec = KVSpec(layers=2, kv_heads=2, head_dim=2, block_tokens=4)
    geometry: Any = (("kv", spec.to_pairs(), " ".join(AXES), 3, None),)
    for more in (
        {},
        {"have": (("kv", b"\x05"),), "hashes": bytes(32)},
        {"landed": ((0, 0, 1, 0, 2), (0, 1, 1, 2, 1)), "peer_id": bytes(8)},
    ):
        described = TransferOffer(geometry=geometry, endpoint_id=bytes(8), **more)  # type: ignore[arg-type]
        for options in (2, 3):
            yield bytes([options]) + msgspec.msgpack.encode(described)
    boxes = bytes([0, 0, 2, 0, 2, 1, 2, 0, 0, 0, 1, 2, 1])
    for options in (0, 1):
        for changes in range(0, 64, 9):
            yield bytes([options, changes, 1, 0, 0, 3]) + bytes([3, 1, 2, 2]) + boxes


def _backends() -> Iterator[bytes]:
    number = np.array([64, 16, 128], np.uint64)
    for lengths in ([8, 8, 8], [8, 4, 12]):
        array = np.array(lengths, np.uint64)
        pieces = Fragments(number, array, owner=None, writable=False)
        said = encode(PlaceKind.MEMORY, 0, pieces)
        assert said is not None
        yield bytes([1, 23]) + said
    yield bytes([0]) + Host(bytes(16), 1).encode()
    yield bytes([1, 7]) + encode_piece(PlaceKind.ARENA, 3, 4096, 8)
    yield bytes([2]) + bytes([2, 0, 0, 0, 1, 0, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0])
    yield bytes([3]) + make_preamble(bytes(32), 1, bytes(32))
    yield (
        bytes([4])
        + UcxBootstrap(lane=5, version=Version(1, 18, 0), address=b"address").to_bytes()
    )
    yield bytes([5, 23]) + descriptor(2, [8, 16])
    yield bytes([6]) + NcclBootstrap("NCCL 2.27", b"there", b"back").encode()


def _store() -> Iterator[bytes]:
    spec = KVSpec(layers=1, kv_heads=1, head_dim=1, block_tokens=1)
    namespace = NamespaceText("kv", spec.to_pairs())
    names = Names(32, bytes(64))
    fields = (7, namespace, names, 500)
    for request in (
        StoreHello(1),
        Find(1, names),
        Put(*fields, 3),
        Get(*fields),
        Stats(2),
    ):
        yield b"\0" + requests.encode(request)
    for reply in (
        Welcome(1, namespaces=(namespace,)),
        Found(1, b"\x00\x01"),
        StoreDone(1, b"\x00\x01", "why", b"\x03\xff"),
    ):
        yield b"\xff" + requests.encode(reply)


def _codecs() -> Iterator[bytes]:
    """Each codec's entry of an image of each form, and its payload."""
    for number, form in enumerate(FORMS):
        image = np.arange(form.nbytes, dtype=np.uint8) // 16 + 48
        room = np.empty(form.nbytes, np.uint8)
        for index, codec in enumerate(CODECS.values()):
            if size := encode_entry(codec, image, form, room):
                entry = room[:size].tobytes()
                yield bytes([number, len(CODECS) * 2 + index]) + entry
                yield bytes([number, index]) + entry[HEAD_BYTES:]


if __name__ == "__main__":
    for name in sys.argv[1:] or TARGETS:
        for data in seeds(name):
            keep(name, data)
