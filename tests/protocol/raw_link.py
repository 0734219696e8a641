"""Speaks frames and the handshake over one socket, from the page alone.

Written from docs/topics/protocol.md with nothing of kvwire.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import struct
import zlib
from typing import Any, NamedTuple, Self

import msgspec
import xxhash

HELLO, ACCEPT, CONFIRM, REFUSE, OFFER, CHOICE = range(1, 7)
PING, PONG, CLOSE, CREDIT = range(0x10, 0x14)
FIN, FAIL = 0x24, 0x25
OPEN, AGREE, SEGMENT, SEGMENT_ACK, COMMIT, COMMIT_ACK = range(0x30, 0x36)
MESSAGE, DATA = 0x40, 0x41
SEALED, CHECKED = 1, 2
GOING_AWAY, AUTHENTICATION, PROFILE, OTHER = 1, 17, 18, 63
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
        """Sends a control frame."""
        self._send_body(frame_type, msgspec.msgpack.encode(fields), request)

    def send_data(
        self, request: int, segment: int, offset: int, data: bytes, *, intact: bool
    ) -> None:
        """Sends a chunk, with a wrong check unless ``intact``."""
        check = payload_check(data) ^ (not intact)
        place = (request, segment, offset, check)
        self._writer.write(header(DATA, CHECKED, self._sent, len(data), *place) + data)
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
