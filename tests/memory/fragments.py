"""Fragments in memory of this process, and their bytes one after the other."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvwire.kv.fragments import Fragments


def content(fragments: Fragments) -> bytes:
    """Read the bytes of fragments."""
    pairs = zip(fragments.addresses.tolist(), fragments.lengths.tolist(), strict=True)
    return b"".join(ctypes.string_at(address, length) for address, length in pairs)


def fill(fragments: Fragments, data: bytes) -> None:
    """Write the bytes of fragments."""
    assert len(data) == fragments.nbytes
    starts = fragments.starts.tolist()
    for i, address in enumerate(fragments.addresses.tolist()):
        piece = data[starts[i] : starts[i + 1]]
        ctypes.memmove(address, piece, len(piece))


def scattered(
    lengths: list[int], seed: int, gap: int = 0
) -> tuple[Fragments, npt.NDArray[np.uint8]]:
    """Fragments of these lengths lying in a random order, and all of their memory."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    offsets = np.zeros(len(lengths), np.uint64)
    end = gap
    for index in order:
        offsets[index] = end
        end += lengths[index] + gap
    memory = np.zeros(end, np.uint8)
    fragments = Fragments(
        np.uint64(memory.ctypes.data) + offsets,
        np.array(lengths, np.uint64),
        owner=memory,
        writable=True,
    )
    return fragments, memory
