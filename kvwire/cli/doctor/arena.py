"""Memory to measure with: fragments that lie apart, as the blocks of a KV cache do.

Every second slot of one array is a fragment; those between must never change, which
shows that a transport writes what it should and nothing beside it.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.fragments import Fragments

# Not zero, which untouched or cleared memory would be as well.
_GAP: Final = 0xA5
_DIGEST_BYTES: Final = 32

Bytes = npt.NDArray[np.uint8]


class Arena:
    """``total_bytes`` in fragments of one size, with a gap behind each."""

    def __init__(self, total_bytes: int, fragment_bytes: int) -> None:
        count = total_bytes // fragment_bytes
        slots = np.full((count, 2, fragment_bytes), _GAP, np.uint8)
        self._fragments: Bytes = slots[:, 0]
        self._gaps: Bytes = slots[:, 1]
        step = np.uint64(2 * fragment_bytes)
        self.fragments = Fragments(
            np.uint64(slots.ctypes.data) + np.arange(count, dtype=np.uint64) * step,
            np.full(count, fragment_bytes, np.uint64),
            owner=slots,
            writable=True,
        )

    def fill(self, seed: int) -> None:
        """Write bytes that the seed determines."""
        shape = self._fragments.shape
        noise = np.random.default_rng(seed).bytes(shape[0] * shape[1])
        self._fragments[:] = np.frombuffer(noise, np.uint8).reshape(shape)

    def clear(self) -> None:
        """Overwrite what was there, so that old bytes cannot pass for new ones."""
        self._fragments[:] = 0

    def digest(self) -> bytes:
        """BLAKE2 of the fragments, in order."""
        whole = np.ascontiguousarray(self._fragments)
        return hashlib.blake2b(whole.data, digest_size=_DIGEST_BYTES).digest()

    @property
    def gaps_untouched(self) -> bool:
        """Whether nothing was written beside the fragments."""
        return bool((self._gaps == _GAP).all())
