"""Payloads as UCX takes them: bytes, or a list of pieces."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.kv.fragments import Fragments
from kvwire.memory.iovec import address_of
from kvwire.types import Device, MemoryKind
from kvwire_ucx import binding
from kvwire_ucx.memory import MemoryHandles


def fragments(
    arena: bytearray, *pieces: tuple[int, int], device: Device | None = None
) -> Fragments:
    """Pieces of an arena, as (offset, length)."""
    table = np.array(pieces, np.uint64)
    return Fragments(
        np.uint64(address_of(arena)) + table[:, 0],
        table[:, 1].copy(),
        owner=arena,
        writable=True,
        device=device,
    )


@pytest.mark.parametrize("pieces", [[(0, 9)], [(0, 9), (20, 9)]])
def test_memory_of_a_device_is_named(pieces: list[tuple[int, int]]) -> None:
    arena = bytearray(100)
    memory = MemoryHandles(fragments(arena, *pieces, device=Device(MemoryKind.CUDA, 0)))
    assert memory.memory_type == binding.MEMORY_CUDA
