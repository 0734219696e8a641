"""Speaks frames and the handshake over a socket, and pulls and pushes KV, both sides.

Written from docs/topics/protocol.md and protocol-kv-transfers.md, with nothing of
kvwire. One transfer at a time goes over a connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import operator
import os
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import msgspec
import xxhash

from tests.protocol.raw_plan import (
    AXES,
    Box,
    Carried,
    Element,
    Misfit,
    Share,
    bitmap,
    carried,
    hashes_digest,
    plan_digest,
)

HELLO, ACCEPT, CONFIRM, REFUSE, OFFER, CHOICE = range(1, 7)
PING, PONG, CLOSE, CREDIT = range(0x10, 0x14)
FIN, FAIL = 0x24, 0x25
OPEN, AGREE, SEGMENT, SEGMENT_ACK, COMMIT, COMMIT_ACK = range(0x30, 0x36)
MESSAGE, DATA, MARKED_DATA = 0x40, 0x41, 0x42
SEALED, CHECKED = 1, 2
GOING_AWAY, AUTHENTICATION, PROFILE, CANCELLED = 1, 17, 18, 36
LOOPBACK, PSK = 0, 1

MAGIC = b"kvwire\r\n"
FIXED_BYTES = 224
SEAL_BYTES = 16
CHUNK_BYTES = 65_536

_HEADER = struct.Struct("<BBHIIIQI")
_TERMS = struct.Struct("<IIIIQ")
_HELLO = struct.Struct("<8sHHBB24s16s16s32s")
_ACCEPT = struct.Struct("<8sHBB24s16s32s32s")
_REFUSE = struct.Struct("<8sHHHB")


class Refused(Exception):
    """The other side has refused a connection or a request."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"code {code}: {reason}")
        self.code, self.reason = code, reason


class Frame(NamedTuple):
    """One frame; ``fields`` of a control frame, ``payload`` of any other."""

    type: int
    request: int
    segment: int
    offset: int
    fields: list[Any]
    payload: bytes
    intact: bool


def header(frame_type: int, flags: int, count: int, length: int, *place: int) -> bytes:
    """Makes the 32 bytes in front of a body; ``place``: request, segment and so on."""
    fields = (*place, 0, 0, 0, 0)[:4]
    first = _HEADER.pack(frame_type, flags, count % 65_536, length, *fields)
    return first + struct.pack("<I", zlib.crc32(first))


def payload_check(data: bytes) -> int:
    """Computes the check of payload."""
    return xxhash.xxh3_64_intdigest(data) % 2**32


def derive(secret: bytes, nonces: bytes, label: str) -> bytes:
    """Computes one key of a connection: HKDF-SHA256 with 32 bytes for a label."""
    root = hmac.digest(nonces, secret, "sha256")
    return hmac.digest(root, f"kvwire {label}".encode() + b"\x01", "sha256")


def seal(key: bytes, count: int, head: bytes, body: bytes) -> bytes:
    """Computes what stands at the end of a sealed control body."""
    data = struct.pack("<Q", count) + head + body
    return hmac.digest(key, data, "sha256")[:SEAL_BYTES]


def key_id(psk: bytes) -> bytes:
    """Computes what HELLO calls a key."""
    return hmac.digest(psk, b"kvwire key id", "sha256")[:16] if psk else bytes(16)


class RawLink:
    """The client's end of a connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer
        self._sent = self._received = 0
        self._seal_key = self._open_key = b""
        self.chunk_bytes = CHUNK_BYTES
        self.digest = b""

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        psk: bytes = b"",
        incarnation: bytes = bytes(16),
        resumes: bytes = b"",
    ) -> Self:
        """Connects and shakes hands, with a key or in loopback mode."""
        link = cls(*await asyncio.open_connection(host, port))
        try:
            await link._shake(psk, incarnation)
            link.send(OFFER, "raw", [["tcp", 1]], [], resumes)
            choice = await link.receive()
            assert choice.type == CHOICE, choice
            verdicts = choice.fields[1]
            if not any(taken for _, taken, *_ in verdicts):
                raise Refused(PROFILE, f"{verdicts}, {choice.fields[2]}")
        except BaseException:
            link.abort()
            raise
        return link

    async def close(self) -> None:
        """Says CLOSE and waits for the other side's."""
        self.send(CLOSE, GOING_AWAY)
        while (await self.receive()).type != CLOSE:
            pass
        self._writer.close()
        await self._writer.wait_closed()

    def abort(self) -> None:
        """Ends the connection without a word."""
        self._writer.transport.abort()

    def send(self, frame_type: int, *fields: Any, request: int = 0) -> None:
        self._send_body(frame_type, msgspec.msgpack.encode(fields), request)

    @property
    def sealed(self) -> bool:
        return bool(self._seal_key)

    def send_data(
        self,
        request: int,
        segment: int,
        offset: int,
        data: bytes,
        *,
        intact: bool,
        frame_type: int = DATA,
    ) -> None:
        """Sends a chunk, with a wrong check unless ``intact``."""
        check = payload_check(data) ^ (not intact)
        place = (request, segment, offset, check)
        head = header(frame_type, CHECKED, self._sent, len(data), *place)
        self._writer.write(head + data)
        self._sent += 1

    async def receive(self) -> Frame:
        """Waits for the next frame; PING is answered, and PONG and CREDIT dropped."""
        while True:
            frame = await self._next()
            if frame.type == PING:
                self.send(PONG, *frame.fields)
            elif frame.type not in (PONG, CREDIT):
                return frame

    async def _shake(self, psk: bytes, incarnation: bytes) -> None:
        trust, nonce = (PSK if psk else LOOPBACK), os.urandom(32)
        terms = _TERMS.pack(CHUNK_BYTES, 0, 0, 1, 0)
        hello = _HELLO.pack(
            *(MAGIC, 1, 1, 0, trust, terms, incarnation, key_id(psk), nonce)
        ).ljust(FIXED_BYTES, b"\0")
        self._send_body(HELLO, hello)
        accept = (await self._next()).payload
        magic, version, role, mode, theirs, _, server_nonce, proof = _ACCEPT.unpack(
            accept[: _ACCEPT.size]
        )
        assert (magic, version, role, mode) == (MAGIC, 1, 1, trust)
        bare = accept[: _ACCEPT.size - 32].ljust(FIXED_BYTES, b"\0")
        self.digest = hashlib.sha256(hello + bare).digest()
        nonces = nonce + server_nonce
        keys = {
            label: derive(psk, nonces, label)
            for label in ("server proof", "client proof", "seal client", "seal server")
        }
        said = b"server" + self.digest
        if not hmac.compare_digest(
            proof, hmac.digest(keys["server proof"], said, "sha256")
        ):
            raise Refused(AUTHENTICATION, "the server's proof is wrong")
        said = b"client" + self.digest + proof
        mine = hmac.digest(keys["client proof"], said, "sha256")
        self._send_body(CONFIRM, (MAGIC + mine).ljust(FIXED_BYTES, b"\0"))
        if psk:
            self._seal_key, self._open_key = keys["seal client"], keys["seal server"]
        self.chunk_bytes = min(CHUNK_BYTES, _TERMS.unpack(theirs)[0])

    def _send_body(self, frame_type: int, body: bytes, request: int = 0) -> None:
        count, key = self._sent, self._seal_key
        if key:
            head = header(frame_type, SEALED, count, len(body) + SEAL_BYTES, request)
            body += seal(key, count, head, body)
        else:
            place = (request, 0, 0, zlib.crc32(body))
            head = header(frame_type, CHECKED, count, len(body), *place)
        self._writer.write(head + body)
        self._sent += 1

    async def _next(self) -> Frame:
        raw = await self._reader.readexactly(32)
        kind, flags, sequence, length, *place, check = _HEADER.unpack(raw[:28])
        assert struct.unpack("<I", raw[28:]) == (zlib.crc32(raw[:28]),)
        assert sequence == self._received % 65_536
        body = await self._reader.readexactly(length)
        count, self._received = self._received, self._received + 1
        request, segment, offset = place
        if kind >= MESSAGE:
            intact = not flags & CHECKED or payload_check(body) == check
            return Frame(kind, request, segment, offset, [], body, intact)
        if self._open_key:
            assert flags == SEALED
            body, sealed = body[:-SEAL_BYTES], body[-SEAL_BYTES:]
            assert sealed == seal(self._open_key, count, raw, body)
        else:
            assert (flags, check) == (CHECKED, zlib.crc32(body))
        if kind == REFUSE:
            _, code, low, high, mode = _REFUSE.unpack(body[: _REFUSE.size])
            raise Refused(code, f"versions {low} to {high}, trust mode {mode}")
        fields = msgspec.msgpack.decode(body) if kind >= OFFER else []
        return Frame(kind, request, segment, offset, fields, body, intact=True)


class RawCache:
    """A cache of one group in one piece of memory, nested as its share says."""

    def __init__(self, share: Share, ids: Sequence[int], pool: int) -> None:
        self.share, self._ids = share, ids
        steps, step = {}, share.item_bytes
        for axis in reversed(share.order):
            steps[axis] = step
            step *= pool if axis == "block" else share.extents[axis]
        self._steps = [steps[axis] for axis in AXES]
        self.memory = bytearray(step)

    def place(self, element: Element) -> slice:
        """Finds an element in the memory."""
        share = self.share
        layer, head = element.layer - share.layers[0], element.head - share.heads[0]
        position, token = divmod(element.token, share.n["block_tokens"])
        at = (layer, self._ids[position], element.kv, token, head, element.dim)
        begin = sum(map(operator.mul, at, self._steps))
        return slice(begin, begin + share.item_bytes)


@dataclass(kw_only=True)
class Side:
    """This side's part in a transfer, over all connections that it goes on with.

    Attributes:
        hashes: By group, one for each block of its list.
        have: By group, whether it has each block of its list: a consumer's.
        met: The other side's ``end``, once it was met.
        landed: Boxes that are whole, here or at the consumer.
        complete: Whether COMMIT has said that everything was marked.
    """

    id: bytes
    cache: RawCache
    producer: bool
    hashes: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    have: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    end: bytes = field(default_factory=lambda: os.urandom(8))
    met: bytes = b""
    landed: list[Box] = field(default_factory=list)
    damaged: list[Box] = field(default_factory=list)
    settled: bool = False
    complete: bool = False
    groups: list[Carried] = field(default_factory=list)

    @property
    def packed_have(self) -> list[tuple[str, bytes]]:
        return [(name, bitmap(bits)) for name, bits in self.have.items()]

    def description(self) -> bytes:
        """Writes what OPEN or AGREE carry; with the plan, once there is one."""
        plan = plan_digest(self.groups) if self.groups else b""
        landed = self.landed if self.met and not self.producer else []
        fields = (
            *([self.cache.share.encoded], self.end, self.met),
            *(hashes_digest(self.hashes), self.packed_have, landed),
            *(plan, self.settled, b""),
        )
        return msgspec.msgpack.encode(fields)

    def meet(self, description: bytes) -> bytes:
        """Reads the other side's description, and plans; returns its plan."""
        given = msgspec.msgpack.decode(description)
        fields = [*given, *(b"", b"", b"", [], [], b"", False, b"")[len(given) - 1 :]]
        geometry, end, _, hashes, have, landed, plan, _ = fields[:8]
        mine = hashes_digest(self.hashes)
        if (mine and hashes and mine != hashes) or self.met not in (b"", end):
            raise Misfit("other hashes, or another transfer")
        here, there = [self.cache.share], [Share(*group) for group in geometry]
        if self.producer:
            self.landed = [tuple(box) for box in landed]
        else:
            here, there, have = there, here, self.packed_have
        self.groups = carried(here, there, dict(have) if mine and hashes else {})
        self.met = end
        return bytes(plan)


async def ask(link: RawLink, side: Side, request: int) -> None:
    """Opens a transfer and waits for the answer: pull or push."""
    side.groups = []
    link.send(
        *(OPEN, side.id, not side.producer, 0, side.description()), request=request
    )
    frame = await _next(link, request)
    assert frame.type == AGREE
    _meet(link, side, request, frame.fields[0], compare=True)


async def answer(link: RawLink, side: Side) -> int:
    """Waits until the other side opens a transfer, and agrees: publish or expect."""
    frame = await link.receive()
    assert frame.type == OPEN
    assert frame.fields[:2] == [side.id, side.producer]
    _meet(link, side, frame.request, frame.fields[3], compare=False)
    link.send(AGREE, side.description(), request=frame.request)
    return frame.request


async def produce(
    link: RawLink,
    side: Side,
    request: int,
    boxes: Sequence[Box],
    *,
    complete: bool = True,
    spoiled: Collection[int] = (),
) -> None:
    """Sends boxes, and waits until the consumer has settled."""
    memory = side.cache.memory
    for number, box in enumerate(boxes, 1):
        elements = side.groups[box[0]].elements(box)
        data = b"".join(memory[side.cache.place(element)] for element in elements)
        mark = _packed(box)
        if mark is not None and len(data) <= link.chunk_bytes and not link.sealed:
            link.send_data(
                *(request, number, mark, data),
                intact=number not in spoiled,
                frame_type=MARKED_DATA,
            )
            continue
        link.send(SEGMENT, number, box, len(data), request=request)
        for at in range(0, len(data), link.chunk_bytes):
            chunk = data[at : at + link.chunk_bytes]
            wrong = number in spoiled and at + len(chunk) == len(data)
            link.send_data(request, number, at, chunk, intact=not wrong)
    link.send(COMMIT, len(boxes), complete, request=request)
    left = dict(enumerate(boxes, 1))
    while (frame := await _next(link, request)).type != COMMIT_ACK:
        assert frame.type == SEGMENT_ACK
        side.landed += [left.pop(number) for number in frame.fields[0]]
    side.damaged += [left.pop(number) for number in frame.fields[0]]
    side.landed += left.values()
    link.send(FIN, 0, request=request)


async def consume(link: RawLink, side: Side, request: int) -> None:
    """Receives until the producer knows that all it has marked is here."""
    segments: list[_Segment] = []
    committed = False
    while (frame := await _next(link, request)).type != FIN:
        if frame.type in (SEGMENT, MARKED_DATA):
            number, box, nbytes, commit = _marked(frame)
            segments.append(_Segment(box, bytearray(nbytes)))
            assert not committed
            assert number == len(segments)
            assert nbytes == side.groups[box[0]].nbytes(box)
            committed, side.complete = commit > 0, commit == 2
        elif frame.type == COMMIT:
            count, side.complete = frame.fields
            assert not committed
            assert count == len(segments)
            committed = True
        if frame.type in (DATA, MARKED_DATA):
            _take(link, side, segments[frame.segment - 1], frame)
        if committed and all(segment.left == 0 for segment in segments):
            numbered = enumerate(segments, 1)
            damaged = [number for number, segment in numbered if segment.damaged]
            side.damaged += [segments[number - 1].box for number in damaged]
            side.settled = True
            link.send(COMMIT_ACK, damaged, request=request)


def _packed(box: Box) -> int | None:
    """Makes the offset of MARKED_DATA; None of a box that has no room in it."""
    group, layer, layers, granule, granules = box
    if group >> 6 or (layer | layers) >> 12 or (granule | granules) >> 16:
        return None
    return group << 56 | layer << 44 | layers << 32 | granule << 16 | granules


def _marked(frame: Frame) -> tuple[int, Box, int, int]:
    """Reads a mark: the segment's number, box and bytes, and its commit."""
    if frame.type == SEGMENT:
        number, box, nbytes, commit = [*frame.fields, 0][:4]
        return number, tuple(box), nbytes, commit
    mark = frame.offset
    layer, layers = mark >> 44 & 0xFFF, mark >> 32 & 0xFFF
    read = (mark >> 56 & 0x3F, layer, layers, mark >> 16 & 0xFFFF, mark & 0xFFFF)
    return frame.segment, read, len(frame.payload), mark >> 62


class _Segment:
    """A segment on its way in."""

    def __init__(self, box: Box, memory: bytearray) -> None:
        self.box, self.memory, self.left = box, memory, len(memory)
        self.damaged = False


def _take(link: RawLink, side: Side, segment: _Segment, frame: Frame) -> None:
    at, data = (frame.offset if frame.type == DATA else 0), frame.payload
    segment.memory[at : at + len(data)] = data
    segment.left -= len(data)
    segment.damaged |= not frame.intact
    if segment.left or segment.damaged:
        return
    cache, size = side.cache, side.cache.share.item_bytes
    elements = side.groups[segment.box[0]].elements(segment.box)
    for number, element in enumerate(elements):
        item = segment.memory[number * size : (number + 1) * size]
        cache.memory[cache.place(element)] = item
    side.landed.append(segment.box)
    link.send(SEGMENT_ACK, [frame.segment], request=frame.request)


def _meet(link: RawLink, side: Side, request: int, said: Any, *, compare: bool) -> None:
    """Plans, or refuses the transfer."""
    try:
        plan = side.meet(said)
        if compare and plan != plan_digest(side.groups):
            raise Misfit("the plans differ")
    except Misfit as exc:
        link.send(FAIL, PROFILE, str(exc), request=request)
        raise


async def _next(link: RawLink, request: int) -> Frame:
    frame = await link.receive()
    assert frame.request == request, frame
    if frame.type == FAIL:
        raise Refused(*frame.fields)
    return frame
