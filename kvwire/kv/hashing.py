"""Content hashes that name blocks: a chain of hashes over the tokens.

A block's hash covers its own tokens and, through the previous block's hash, every token
that its KV depends on. Equal hashes mean equal KV, so two processes can compare their
blocks without sending tokens.

The chain uses SHA-256, not Python's ``hash()``. Python's differs between processes, so
there would be no hits (LMCache #1139). Besides, an attacker could construct collisions
in it to obtain another user's KV. Two chains are comparable if scheme, block size and
seed are equal; the handshake transmits these as :meth:`HashScheme.to_pairs`.

A link of the chain is ``sha256(parent || tokens as little-endian int32 || extra)``. All
blocks have the same number of tokens, so the boundary between tokens and extra is
unambiguous. The parent of the first block is the root, ``sha256(sha256(scheme) || seed
digest || salt)``.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire import limits
from kvwire.errors import UsageError, wrong_type
from kvwire.kv.tensors import refuse_masked
from kvwire.types import plain, whole

SCHEME: Final = "sha256-chain-1"
"""The chain's version; it changes whenever the same tokens would get other hashes."""

BlockHash: TypeAlias = bytes
"""32 bytes."""

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"


@dataclass(frozen=True, slots=True)
class HashScheme:
    """Names blocks by their content; processes that share a cache use equal schemes.

    Attributes:
        block_tokens: Tokens per block. Only full blocks get a hash.
        seed: Makes the hashes of deployments differ, so that outsiders can neither
            prepare a collision nor recognise a prompt. It is never sent: peers compare
            its digest.

    Raises:
        UsageError: ``block_tokens`` is out of range, or ``seed`` is not bytes.
    """

    block_tokens: int
    seed: bytes = b""

    def __post_init__(self) -> None:
        size: object = plain(self.block_tokens)
        object.__setattr__(self, "block_tokens", size)
        if type(size) is not int or not 1 <= size <= limits.KV_BLOCK_TOKENS_MAX:
            raise UsageError(
                f"HashScheme: block_tokens={size!r}: pass a number from 1 to "
                f"{limits.KV_BLOCK_TOKENS_MAX}"
            )
        if not isinstance(self.seed, _BYTES):
            raise wrong_type("HashScheme: seed", self.seed, "bytes")

    def root(self, salt: bytes = b"") -> BlockHash:
        """Return the parent hash of every first block.

        Args:
            salt: Gives different hashes to requests that must not share blocks, for
                example requests of two tenants.
        """
        if not isinstance(salt, _BYTES):
            raise wrong_type("block_hashes: salt", salt, "bytes")
        name = sha256(f"kvwire/{SCHEME}/{self.block_tokens}".encode()).digest()
        return sha256(name + sha256(self.seed).digest() + salt).digest()

    def block_hashes(
        self,
        tokens: TokenIds,
        *,
        parent: BlockHash | None = None,
        salt: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
    ) -> list[BlockHash]:
        """Return the hashes of the full blocks of a token sequence.

        Args:
            tokens: Token ids, 0 to 2**31 - 1. Tokens after the last full block are
                ignored.
            parent: The hash of the preceding block; None at the start of a request.
            salt: See :meth:`root`; ignored with ``parent``, whose hash covers it
                already.
            extra: Other inputs that a block's KV depends on (an image's hash, an
                adapter's name), by the block's position in ``tokens``.

        Raises:
            UsageError: A token id, or another argument, is invalid; or ``extra`` names
                a block that is not full.
        """
        if parent is not None:
            if not isinstance(parent, _BYTES):
                raise wrong_type("block_hashes: parent", parent, "bytes")
            if len(parent) != _HASH_BYTES:
                raise UsageError(
                    f"block_hashes: parent has {len(parent)} bytes, and a hash has "
                    f"{_HASH_BYTES}; pass None at the start of a request"
                )
        data = _token_bytes(tokens)
        step = self.block_tokens * _TOKEN_BYTES
        count = len(data) // step
        if extra:
            _check_extra(extra)
        if extra and not all(0 <= position < count for position in extra):
            raise UsageError(
                f"block_hashes: extra names blocks {sorted(extra)}, but the prompt "
                f"has only {count} full blocks"
            )
        link = self.root(salt) if parent is None else parent
        hashes: list[BlockHash] = []
        # A chain cannot be vectorised. This loop takes 0.4 us per block of 16 tokens,
        # most of it in SHA-256.
        if not extra:
            for start in range(0, count * step, step):
                link = sha256(link + data[start : start + step]).digest()
                hashes.append(link)
            return hashes
        for position in range(count):
            start = position * step
            more = extra.get(position, b"")
            link = sha256(link + data[start : start + step] + more).digest()
            hashes.append(link)
        return hashes

    def to_pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the scheme as (name, value) texts in a fixed order.

        Peers that differ in any pair have no hash in common. Comparing the pairs
        distinguishes such a misconfiguration from a cold cache.
        """
        digest = sha256(b"kvwire/hash-seed/" + sha256(self.seed).digest()).hexdigest()
        return (
            ("hash_scheme", SCHEME),
            ("hash_block_tokens", str(self.block_tokens)),
            ("hash_seed", digest[:16]),
        )


_BYTES: Final = bytes, bytearray
_HASH_BYTES: Final = 32
_TOKEN_BYTES: Final = 4
_TOKEN_MAX: Final = 2**31 - 1


def _check_extra(extra: object) -> None:
    """Refuse what does not map positions to bytes."""
    if not isinstance(extra, Mapping):
        raise wrong_type("block_hashes: extra", extra, "{position: bytes}")
    for position, more in extra.items():
        if whole(position) is None:
            raise wrong_type("block_hashes: extra: key", position, "a position")
        if not isinstance(more, _BYTES):
            raise wrong_type(f"block_hashes: extra of block {position}", more, "bytes")


def _token_bytes(tokens: TokenIds) -> bytes:
    ids: npt.NDArray[np.integer] = np.asarray(())
    if isinstance(tokens, list | tuple):
        # NumPy would examine each number of a list twice.
        with suppress(TypeError, OverflowError):  # NumPy's error below is clearer
            ids = np.frombuffer(array("i", tokens), np.intc)
    if ids.size == 0:
        refuse_masked(tokens, "block_hashes")
        ids = np.asarray(tokens)
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UsageError(
            "block_hashes: pass a flat sequence of token ids, not "
            f"{ids.ndim}-dimensional {ids.dtype.name}"
        )
    if int(ids.min()) < 0 or int(ids.max()) > _TOKEN_MAX:
        wrong = ids.min() if int(ids.min()) < 0 else ids.max()
        raise UsageError(
            f"block_hashes: token id {int(wrong)} is outside 0 to 2**31 - 1"
        )
    return ids.astype("<i4").tobytes()
