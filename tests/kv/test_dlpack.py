"""DLPack is read from the C struct itself; NumPy's exporter is the reference."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.dlpack import CUDA, HOST, read_dlpack


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    dtype=st.sampled_from(["uint8", "int16", "float16", "float32", "int64", "float64"]),
    step=st.integers(1, 3),
    turned=st.booleans(),
)
def test_what_numpy_exports(
    shape: list[int], dtype: str, step: int, *, turned: bool
) -> None:
    array = np.zeros(shape, dtype)[::step]
    array = array.T if turned else array
    found = read_dlpack(array, "t")
    assert found.address == array.__array_interface__["data"][0]
    assert found.shape == array.shape
    # NumPy is free to say any step of a dimension that has one element.
    for extent, mine, its in zip(
        array.shape, found.strides, array.strides, strict=True
    ):
        assert extent == 1 or mine == its
    assert (found.dtype, found.item_bytes) == (dtype, array.itemsize)
    assert found.device == (HOST, 0)


def test_the_capsule_keeps_the_memory() -> None:
    array = np.arange(1000, dtype=np.uint8)
    found = read_dlpack(array[10:], "t")
    del array
    read = (ctypes.c_uint8 * 3).from_address(found.address)
    assert list(read) == [10, 11, 12]


class Exporter:
    """Says what it is told to, and exports nothing."""

    def __init__(self, device: tuple[int, int], capsule: Any) -> None:
        self._device = device
        self._capsule = capsule
        self.streams: list[int | None] = []

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def test_a_device_is_not_synchronised() -> None:
    exporter = Exporter((CUDA, 1), np.zeros(3).__dlpack__())
    assert read_dlpack(exporter, "t").device == (CUDA, 1)
    assert exporter.streams == [-1]


def test_what_is_no_capsule_is_refused() -> None:
    with pytest.raises(UsageError, match="t: a Exporter that DLPack does not export"):
        read_dlpack(Exporter((HOST, 0), object()), "t")


def test_read_only_memory_is_refused() -> None:
    """NumPy refuses to export it, and says so."""
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(UsageError, match="t: a ndarray that DLPack does not export"):
        read_dlpack(array, "t")
