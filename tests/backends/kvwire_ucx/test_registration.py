"""Registered ranges: exactly what is exposed, for as long as it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
from kvwire.memory.copy import address_of
from kvwire.types import Device, MemoryKind
from kvwire_ucx import binding
from kvwire_ucx.context import Context
from kvwire_ucx.registration import Registration
from kvwire_ucx.requests import MemoryHandles
from kvwire_ucx.windows import KEY_BYTES_MAX
from tests.backends.kvwire_ucx.support import needs_ucx

pytestmark = needs_ucx

PAGE = 4096


@pytest.fixture
def context() -> Iterator[Context]:
    made = Context({}, keys_end=True)
    yield made
    made.close()


def test_a_range_has_a_key_until_it_is_closed(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmapped: list[object] = []
    real = context.library.ucp.mem_unmap
    memory = bytearray(PAGE)
    one = Registration(context, address_of(memory), PAGE)
    assert 0 < len(one.key) <= KEY_BYTES_MAX

    def noted(*arguments: object) -> int:
        unmapped.append(arguments)
        return int(real(*arguments))

    monkeypatch.setattr(context.library.ucp, "mem_unmap", noted)
    one.close()
    one.close()
    assert len(unmapped) == 1


def test_memory_that_ucx_refuses_to_register(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of locked memory, for example."""
    memory = bytearray(PAGE)
    monkeypatch.setattr(context.library.ucp, "mem_map", lambda *_: -3)
    with pytest.raises(BackendUnavailable, match="4096 bytes cannot be registered"):
        Registration(context, address_of(memory), PAGE)


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
