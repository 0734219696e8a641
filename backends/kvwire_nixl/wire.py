"""Messages between the two halves of a lane, over the control link and over NIXL.

A *bootstrap* names the agent. The server's also has the agent's address; the client's
cannot, since its agent is still being created, so the address comes with the first
payload. A *descriptor* names a payload's place, and describes registered memory that
the peer does not know yet. A *note* accompanies a read, and has the number of payloads
read so far. Each message carries a proof of the lane's secret, except the bootstrap,
which the control link protects.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.errors import BackendUnavailable, MalformedFrame
from kvwire.limits import BOOTSTRAP_BYTES_MAX, DESCRIPTOR_BYTES_MAX, SPAN_PIECES_MAX
from kvwire.types import Role

RULE: Final = "KVW-LN-07"
WORD_BYTES: Final = 8
# In place of a count: this half has ended.
BYE: Final = 2**64 - 1
PROOF_BYTES: Final = 8

Array = npt.NDArray[np.uint64]

_MAGIC: Final = b"KVNIXL01"
# magic, address of the word, lengths of version, plug-in, agent's name, metadata
_HEAD: Final = struct.Struct("<8sQBBBH")
# pieces, descriptions of memory, address of the word
_PLACE: Final = struct.Struct("<HHQ")
_LENGTH: Final = struct.Struct("<H")
_COUNT: Final = struct.Struct("<Q")
_PIECE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class NixlBootstrap:
    """The first message from one half of a lane to the other, before anything moves."""

    version: str
    plugin: str
    agent: str
    word: int = 0  # address of the half's word of life; 0 if unknown
    metadata: bytes = b""

    def encode(self) -> bytes:
        """Return it as bytes.

        Raises:
            BackendUnavailable: It is too long, because there are too many devices.
        """
        texts = [text.encode() for text in (self.version, self.plugin, self.agent)]
        lengths = (*map(len, texts), len(self.metadata))
        size = _HEAD.size + sum(lengths)
        if size > BOOTSTRAP_BYTES_MAX:
            raise BackendUnavailable(
                f"NIXL needs {size} bytes to describe its {self.plugin} devices, and a "
                f"bootstrap has {BOOTSTRAP_BYTES_MAX}; name fewer of them, such as "
                f'with "param.device_list"'
            )
        head = _HEAD.pack(_MAGIC, self.word, *lengths)
        return head + b"".join(texts) + self.metadata

    @classmethod
    def decode(cls, raw: bytes) -> NixlBootstrap:
        """Read a peer's bootstrap.

        Raises:
            BackendUnavailable: It is malformed or of another version.
        """
        if not _HEAD.size <= len(raw) <= BOOTSTRAP_BYTES_MAX:
            raise _unreadable(f"{len(raw)} bytes")
        magic, word, *lengths = _HEAD.unpack_from(raw)
        if magic != _MAGIC:
            raise _unreadable(
                f"it begins with {magic!r}, and this side's with {_MAGIC!r}; both "
                f"sides need the same kvwire"
            )
        if len(raw) != _HEAD.size + sum(lengths):
            raise _unreadable(f"of {len(raw)} bytes, which do not match its lengths")
        parts = []
        begin = _HEAD.size
        for length in lengths:
            parts.append(raw[begin : begin + length])
            begin += length
        try:
            version, plugin, agent = (part.decode("ascii") for part in parts[:3])
        except UnicodeDecodeError:
            raise _unreadable("with a name that is not text") from None
        return cls(version, plugin, agent, word, parts[3])

    def require_same(self, own: NixlBootstrap) -> None:
        """Refuse a peer whose NIXL may be incompatible with ours.

        Raises:
            BackendUnavailable: The plug-in or the minor version differs.
        """
        theirs = f"NIXL {self.version} with {self.plugin}"
        ours = f"NIXL {own.version} with {own.plugin}"
        if (_minor(self.version), self.plugin) != (_minor(own.version), own.plugin):
            raise BackendUnavailable(
                f"the peer has {theirs[:80]} and this side {ours}: both sides need the "
                f"same plug-in and the same minor version"
            )


@dataclass(frozen=True, slots=True)
class NixlPlace:
    """The place of a payload in its sender's memory."""

    addresses: Array
    lengths: Array
    word: int = 0
    news: tuple[bytes, ...] = ()


class LaneProofs:
    """Makes and checks the proofs of the lane's secret that its messages carry."""

    def __init__(self, secret: bytes, role: Role) -> None:
        self._secret = secret
        self._role = role

    def word(self, *, of_peer: bool = False) -> bytes:
        """Return the word in a side's memory that marks its half as alive."""
        return self._proof(b"alive", of_peer)

    def place(self, place: NixlPlace) -> bytes:
        """Return the descriptor of a payload; b"" if it would be too long."""
        body = [_PLACE.pack(place.addresses.size, len(place.news), place.word)]
        for news in place.news:
            body += (_LENGTH.pack(len(news)), news)
        body += (place.addresses.tobytes(), place.lengths.tobytes())
        raw = b"".join(body)
        if len(raw) + PROOF_BYTES > DESCRIPTOR_BYTES_MAX:
            return b""
        return raw + self._proof(b"place" + raw, False)

    def read_place(self, raw: bytes, nbytes: int) -> NixlPlace:
        """Read a peer's descriptor of a payload of ``nbytes`` bytes.

        Raises:
            MalformedFrame: A correct lane would not make such a descriptor.
        """
        body = raw[:-PROOF_BYTES]
        proof = raw[-PROOF_BYTES:]
        if not _PLACE.size + PROOF_BYTES <= len(raw) <= DESCRIPTOR_BYTES_MAX:
            raise _malformed(f"a descriptor of {len(raw)} bytes")
        if not hmac.compare_digest(proof, self._proof(b"place" + body, True)):
            raise _malformed("a descriptor that does not prove the lane's secret")
        pieces, count, word = _PLACE.unpack_from(body)
        news = []
        begin = _PLACE.size
        for _ in range(count):
            if begin + _LENGTH.size > len(body):
                raise _malformed("a descriptor that ends too early")
            (length,) = _LENGTH.unpack_from(body, begin)
            begin += _LENGTH.size
            news.append(body[begin : begin + length])
            begin += length
        if pieces > SPAN_PIECES_MAX or len(body) != begin + pieces * _PIECE_BYTES:
            raise _malformed(f"a descriptor of {len(raw)} bytes for {pieces} pieces")
        addresses, lengths = np.frombuffer(body, np.uint64, 2 * pieces, begin).reshape(
            2, pieces
        )
        # Each length is compared before they are added, since the sum could wrap
        # around.
        if (lengths > nbytes).any() or not lengths.all() or lengths.sum() != nbytes:
            raise _malformed(f"pieces that are not the {nbytes} bytes of the payload")
        return NixlPlace(addresses, lengths, word, tuple(news))

    def note(self, count: int) -> bytes:
        """Return a note with the number of read payloads."""
        number = _COUNT.pack(count)
        return number + self._proof(b"read" + number, False)

    def read_notes(self, notes: Iterable[bytes]) -> tuple[int, bool]:
        """Return how many payloads the peer has read, and whether it has ended.

        Notes that do not prove the secret are not from the peer, and are ignored.
        """
        most = 0
        bye = False
        for note in notes:
            number = note[: _COUNT.size]
            proof = note[_COUNT.size :]
            if hmac.compare_digest(proof, self._proof(b"read" + number, True)):
                (count,) = _COUNT.unpack(number)
                bye |= count == BYE
                most = max(most, count if count != BYE else 0)
        return most, bye

    def _proof(self, text: bytes, of_peer: bool) -> bytes:
        role = self._role.other if of_peer else self._role
        text = b"kvwire nixl %d " % role + text
        return hmac.digest(self._secret, text, hashlib.sha256)[:PROOF_BYTES]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _unreadable(what: str) -> BackendUnavailable:
    return BackendUnavailable(f"the peer's bootstrap cannot be read: {what}")


def _malformed(what: str) -> MalformedFrame:
    return MalformedFrame(RULE, f"nixl: {what}")
