"""vLLM's own names of blocks, for programs that follow its KV events."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from kvwire.errors import UsageError
from kvwire.kv.hashing import HashScheme

_TOKEN_MAX: Final = 2**31 - 1


def vllm_block_hashes(
    tokens: Sequence[int], block_tokens: int, *, seed: str = "vllm-none-hash"
) -> list[bytes]:
    """Return the hashes that vLLM computes for the full blocks of a prompt.

    With these, a :class:`kvwire.BlockPool` or an index uses the same names as vLLM's
    own cache and KV events, provided that vLLM runs with ``--prefix-caching-hash-algo
    sha256_cbor``. vLLM's events contain only the last 8 bytes of a hash, as a number,
    unless ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``. The hashes do not match for
    prompts with an adapter, an image or a salt.

    Args:
        tokens: Token ids, 0 to 2**31 - 1.
        block_tokens: vLLM's ``--block-size``.
        seed: The engines' ``PYTHONHASHSEED``; by default the value that vLLM uses if
            the variable is not set.

    Raises:
        UsageError: A token id is invalid, or the block size is out of range.
    """
    scheme = HashScheme(block_tokens)
    if tokens and not 0 <= min(tokens) <= max(tokens) <= _TOKEN_MAX:
        raise UsageError(
            f"vllm_block_hashes: token ids are 0 to {_TOKEN_MAX}, not {min(tokens)} to "
            f"{max(tokens)}"
        )
    word = seed.encode()
    link = sha256(_cbor_head(_CBOR_TEXT, len(word)) + word).digest()
    begins = _cbor_head(_CBOR_ARRAY, 3) + _cbor_head(_CBOR_BYTES, len(link))
    lists = _cbor_head(_CBOR_ARRAY, block_tokens)
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - block_tokens + 1, scheme.block_tokens):
        block = tokens[start : start + block_tokens]
        numbers = b"".join(_cbor_head(_CBOR_NUMBER, int(one)) for one in block)
        link = sha256(begins + link + lists + numbers + _CBOR_NULL).digest()
        hashes.append(link)
    return hashes


# Kinds of CBOR items (RFC 8949): the upper three bits of an item's first byte.
_CBOR_NUMBER = 0x00
_CBOR_BYTES = 0x40
_CBOR_TEXT = 0x60
_CBOR_ARRAY = 0x80
_CBOR_NULL: Final = b"\xf6"


def _cbor_head(kind: int, number: int) -> bytes:
    """Return the head of a CBOR item, in as few bytes as its number or length needs."""
    if number < 24:
        return bytes((kind | number,))
    power = 0 if number < 2**8 else 1 if number < 2**16 else 2
    return bytes((kind | 24 + power,)) + number.to_bytes(1 << power, "big")
