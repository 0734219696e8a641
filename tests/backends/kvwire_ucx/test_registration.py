"""Registered ranges: exactly what is lent, for as long as it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
from kvwire.memory.copy import address_of
from kvwire.types import Device, MemoryKind
from kvwire_ucx import binding
from kvwire_ucx.context import Context
from kvwire_ucx.pieces import KEY_BYTES_MAX
from kvwire_ucx.registration import Registration, Registrations
from kvwire_ucx.requests import MemoryHandles
from tests.backends.kvwire_ucx.support import needs_ucx

pytestmark = needs_ucx

PAGE = 4096


@pytest.fixture
def context() -> Iterator[Context]:
    made = Context({"one_sided": "yes"})
    yield made
    made.close()


def ranges(count: int) -> Fragments:
    arena = np.zeros((count, 2 * PAGE), np.uint8)
    addresses = np.uint64(arena.ctypes.data) + np.arange(
        0, arena.nbytes, 2 * PAGE, dtype=np.uint64
    )
    return Fragments(
        addresses, np.full(count, PAGE, np.uint64), owner=arena, writable=True
    )


def test_a_range_is_registered_until_its_last_payload_is_over(context: Context) -> None:
    held, memory = Registrations(context, spare_max=0), ranges(2)
    both, first = held.lend(memory), held.lend(memory.slice(0, PAGE))
    assert [(one.address, one.nbytes) for one in both] == [
        (int(address), PAGE) for address in memory.addresses
    ]
    assert first[0] is both[0]
    assert all(0 < len(one.key) <= KEY_BYTES_MAX for one in both)
    held.give_back(both)
    assert len(held) == 1
    held.give_back(first)
    assert len(held) == 0


def test_some_are_kept_and_those_longest_unused_go_first(context: Context) -> None:
    held, memory = Registrations(context, spare_max=2), ranges(3)
    one, two, three = (held.lend(memory.slice(i * PAGE, PAGE)) for i in range(3))
    for lent in (two, one, three):
        held.give_back(lent)
    assert len(held) == 2
    assert held.lend(memory.slice(0, PAGE))[0] is one[0]
    assert held.lend(memory.slice(PAGE, PAGE))[0] is not two[0]
    held.close()
    assert len(held) == 0


def test_memory_lives_as_long_as_it_is_registered(context: Context) -> None:
    memory = ranges(1)
    alive = weakref.ref(memory.owner)
    address, length = int(memory.addresses[0]), int(memory.lengths[0])
    one = Registration(context, address, length, memory.owner)
    del memory
    gc.collect()
    assert alive() is not None
    one.close()
    one.close()
    assert alive() is None


def test_what_ucx_refuses_is_told_and_nothing_stays(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, calls = Registrations(context, spare_max=0), []
    real = context.library.ucp.mem_map

    def second_fails(*arguments: object) -> int:
        calls.append(arguments)
        return -3 if len(calls) == 2 else int(real(*arguments))

    monkeypatch.setattr(context.library.ucp, "mem_map", second_fails)
    with pytest.raises(BackendUnavailable, match=r"4096 bytes cannot be registered"):
        held.lend(ranges(2))
    assert len(held) == 0


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
