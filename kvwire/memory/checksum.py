"""The payload checksum: xxh3, 32 bits of it, of a view or of a list of fragments.

xxh3 runs at memory speed (over 90 GB/s in cache where zlib's crc32 does 6.8), which is
why it can stay on by default. It finds accidents, not attackers: there is no key in it.
"""

from __future__ import annotations

import ctypes

import xxhash

from kvwire.kv.fragments import Fragments

Payload = memoryview | Fragments
_LOW_32_BITS = 0xFFFF_FFFF


def checksum(payload: Payload) -> int:
    """The low 32 bits of xxh3-64 over the payload, in canonical order."""
    if isinstance(payload, Fragments):
        state = xxhash.xxh3_64()
        for address, length in zip(
            payload.addresses.tolist(), payload.lengths.tolist(), strict=True
        ):
            state.update((ctypes.c_char * length).from_address(address))
        return state.intdigest() & _LOW_32_BITS
    return xxhash.xxh3_64_intdigest(payload) & _LOW_32_BITS
