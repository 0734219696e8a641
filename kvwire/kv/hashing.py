"""Names for the contents of blocks: a chain of hashes over the tokens.

The hash of a block covers its own tokens and, through the hash of the block before it,
every token that its KV depends on. Equal hashes mean equal KV, so two processes find
out which blocks one of them has already without sending a token.

The chain is SHA-256, not Python's ``hash()``: that differs between processes, which
ends in no hit at all (LMCache #1139), and collisions of it can be built on purpose,
which ends in another user's KV. What makes two chains comparable (scheme, block size,
seed) goes into the handshake as :meth:`HashScheme.to_pairs`.

A link of the chain is ``sha256(parent || tokens as little-endian int32 || extra)``. The
tokens of a block are of one length, so nothing can move between tokens and extra. The
parent of the first block is the root, ``sha256(sha256(scheme) || seed digest ||
salt)``.
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
from kvwire.errors import UsageError
from kvwire.kv.tensors import refuse_masked
from kvwire.types import plain

SCHEME: Final = "sha256-chain-1"
"""Changes whenever the same tokens would get other hashes."""

BlockHash: TypeAlias = bytes
"""32 bytes."""

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"


@dataclass(frozen=True, slots=True)
class HashScheme:
    """Names blocks by their content; equal on all that share a cache.

    Attributes:
        block_tokens: Tokens of a block. Only full blocks have a name.
        seed: Sets deployments apart, so that nobody outside can prepare a collision or
            recognise a prompt. Never sent: peers compare a digest of it.
    """

    block_tokens: int
    seed: bytes = b""

    def __post_init__(self) -> None:
        size: object = plain(self.block_tokens)
        object.__setattr__(self, "block_tokens", size)
        if type(size) is not int or not 1 <= size <= limits.KV_BLOCK_TOKENS_MAX:
            raise UsageError(
                f"HashScheme: block_tokens={size!r}: a number from 1 to "
                f"{limits.KV_BLOCK_TOKENS_MAX}"
            )

    def root(self, salt: bytes = b"") -> BlockHash:
        """Return the parent of every first block.

        Args:
            salt: Sets requests apart that must not share blocks, such as tenants.
        """
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
        """Return the hashes of the full blocks that some tokens fill.

        Args:
            tokens: Token ids, 0 to 2**31 - 1. A rest that fills no block is left out.
            parent: The hash of the block before them; None at the start of a request.
            salt: See :meth:`root`; of no effect with ``parent``, which covers it.
            extra: What else the KV of a block depends on, by its position among these
                blocks: an image's hash, an adapter's name.

        Raises:
            UsageError: A token id is none, or ``extra`` names a block that is not full.
        """
        data = _token_bytes(tokens)
        step = self.block_tokens * _TOKEN_BYTES
        count = len(data) // step
        if extra and not all(0 <= position < count for position in extra):
            raise UsageError(
                f"block_hashes: extra is for blocks {sorted(extra)}; there are {count} "
                "full ones"
            )
        link = self.root(salt) if parent is None else parent
        hashes: list[BlockHash] = []
        # A chain cannot be vectorised; this loop is 0.4 us a block of 16 tokens, of
        # which SHA-256 itself is most.
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

        Peers with other values have no hash in common; comparing them tells that from a
        cold cache.
        """
        digest = sha256(b"kvwire/hash-seed/" + sha256(self.seed).digest()).hexdigest()
        return (
            ("hash_scheme", SCHEME),
            ("hash_block_tokens", str(self.block_tokens)),
            ("hash_seed", digest[:16]),
        )


def vllm_block_hashes(
    tokens: Sequence[int], block_tokens: int, *, seed: str = "vllm-none-hash"
) -> list[BlockHash]:
    """Return the names that vLLM itself gives to the full blocks of a prompt.

    So that a :class:`kvwire.BlockPool` or an index has the names of vLLM's own cache
    and KV events, where vLLM runs with ``--prefix-caching-hash-algo sha256_cbor``. Its
    events say them as the number that the last 8 bytes are, unless
    ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``. Prompts with an adapter, a picture or a
    salt have other names.

    Args:
        tokens: Token ids, 0 to 2**31 - 1.
        block_tokens: vLLM's ``--block-size``.
        seed: The engines' ``PYTHONHASHSEED``; what vLLM takes without one.

    Raises:
        UsageError: A token id is none, or the block size is out of range.
    """
    scheme = HashScheme(block_tokens)
    _token_bytes(tokens)  # which refuses what is no token id
    word = seed.encode()
    link = sha256(_cbor_head(_CBOR_TEXT, len(word)) + word).digest()
    begins = _cbor_head(_CBOR_ARRAY, 3) + _cbor_head(_CBOR_BYTES, len(link))
    lists = _cbor_head(_CBOR_ARRAY, block_tokens)
    hashes: list[BlockHash] = []
    for start in range(0, len(tokens) - block_tokens + 1, scheme.block_tokens):
        block = tokens[start : start + block_tokens]
        numbers = b"".join(_cbor_head(_CBOR_NUMBER, int(one)) for one in block)
        link = sha256(begins + link + lists + numbers + _CBOR_NULL).digest()
        hashes.append(link)
    return hashes


# Kinds of an item in CBOR (RFC 8949), which its first byte says in its upper bits.
_CBOR_NUMBER, _CBOR_BYTES, _CBOR_TEXT, _CBOR_ARRAY = 0x00, 0x40, 0x60, 0x80
_CBOR_NULL: Final = b"\xf6"


def _cbor_head(kind: int, number: int) -> bytes:
    """Return a kind with its number or length, in as few bytes as hold it."""
    if number < 24:
        return bytes((kind | number,))
    power = 0 if number < 2**8 else 1 if number < 2**16 else 2
    return bytes((kind | 24 + power,)) + number.to_bytes(1 << power, "big")


_TOKEN_BYTES: Final = 4
_TOKEN_MAX: Final = 2**31 - 1


def _token_bytes(tokens: TokenIds) -> bytes:
    ids: npt.NDArray[np.integer] = np.asarray(())
    if isinstance(tokens, list | tuple):
        # NumPy looks at each number of a list twice.
        with suppress(TypeError, OverflowError):  # it says below what is wrong
            ids = np.frombuffer(array("i", tokens), np.intc)
    if ids.size == 0:
        refuse_masked(tokens, "block_hashes")
        ids = np.asarray(tokens)
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UsageError(
            f"block_hashes: a flat sequence of token ids, not {ids.ndim}-dimensional "
            f"{ids.dtype.name}"
        )
    if int(ids.min()) < 0 or int(ids.max()) > _TOKEN_MAX:
        wrong = ids.min() if int(ids.min()) < 0 else ids.max()
        raise UsageError(f"block_hashes: token id {int(wrong)} is not 0 to 2**31 - 1")
    return ids.astype("<i4").tobytes()
