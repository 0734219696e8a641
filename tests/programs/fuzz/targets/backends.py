"""What backends read of a peer beside the frames: bootstraps, descriptors, preambles.

The first byte chooses which, the rest are the bytes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Final

import numpy as np

from kvwire.errors import BackendUnavailable, ProtocolError
from kvwire.limits import KIB
from kvwire_local.descriptor import PlaceKind, decode, encode
from kvwire_local.rendezvous import Host
from kvwire_local.sent_payloads import SentPayloads
from kvwire_local.windows import OpenedWindows
from kvwire_local.wire import LocalMessageType, LocalWire
from kvwire_nccl.lane import NcclBootstrap
from kvwire_tcp.preamble import PREAMBLE_BYTES, is_preamble, is_proof, token_in
from kvwire_ucx.bootstrap import parse
from kvwire_ucx.pieces import PIECES_MAX, descriptor, read_descriptor
from tests.programs.fuzz.reader import Reader


def run(data: bytes) -> int:
    """Nothing but what the contract of lanes names is raised."""
    reader = Reader(data)
    read = reader.pick(_READERS)
    with contextlib.suppress(BackendUnavailable, ProtocolError):
        read(reader, data[1:])
    # A Unix socket is read into 64 KiB at once, whatever comes.
    return max(len(data), 16 * KIB) if read is _local_records else len(data)


def _local_host(_: Reader, said: bytes) -> None:
    assert Host.decode(said).encode() == said


def _local_descriptor(reader: Reader, _: bytes) -> None:
    nbytes = 1 + reader.number() % 2**34
    said = reader.take(1024)
    place = decode(said, nbytes)
    if place.fragments is None:
        assert place.kind is PlaceKind.LATER
        return
    fragments = place.fragments
    assert fragments.nbytes == nbytes
    assert fragments.lengths.all()
    assert (fragments.addresses < np.uint64(2**63)).all()
    again = encode(place.kind, place.arena, fragments)
    if again is not None:
        other = decode(again, nbytes).fragments
        assert other is not None
        assert (other.addresses == fragments.addresses).all()
        assert (other.lengths == fragments.lengths).all()


def _local_records(_: Reader, said: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    wire, outgoing = LocalWire(ours), SentPayloads()
    opened = OpenedWindows("user")
    try:
        theirs.sendall(said)
        records, there = wire.receive()
        assert there
        for record in records:
            assert record.kind in LocalMessageType
            if record.kind is LocalMessageType.READ:
                outgoing.read(record.body)
            elif record.kind is LocalMessageType.ARENA:
                wire.take_fd()
            elif record.kind is LocalMessageType.WINDOW:
                opened.announced(record.body)
            elif record.kind is LocalMessageType.CONCEALED:
                opened.concealed(record.body)
    finally:
        theirs.close()
        wire.close()
        outgoing.close()


def _tcp_preamble(_: Reader, said: bytes) -> None:
    whole = said[:PREAMBLE_BYTES].ljust(PREAMBLE_BYTES, b"\0")
    assert is_preamble(memoryview(whole)) == whole.startswith(b"KVWIRE+L")
    assert len(token_in(whole)) == 16
    assert not is_proof(whole, b"s" * 32, 1)


def _ucx_bootstrap(_: Reader, said: bytes) -> None:
    assert parse(said).to_bytes() == said


def _ucx_descriptor(reader: Reader, _: bytes) -> None:
    nbytes = 1 + reader.number() % 2**34
    said = reader.take(1024)
    first, lengths = read_descriptor(said, nbytes)
    assert descriptor(first, lengths) == said
    assert len(lengths) <= PIECES_MAX
    assert not lengths or (sum(lengths) == nbytes and all(lengths))


def _nccl_bootstrap(_: Reader, said: bytes) -> None:
    assert NcclBootstrap.decode(said).encode() == said


_READERS: Final[tuple[Callable[[Reader, bytes], None], ...]] = (
    _local_host,
    _local_descriptor,
    _local_records,
    _tcp_preamble,
    _ucx_bootstrap,
    _ucx_descriptor,
    _nccl_bootstrap,
)
