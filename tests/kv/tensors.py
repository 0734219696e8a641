"""A tensor that answers as those of torch do, over an array."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt


class FakeDevice:
    """Has a type, such as ``cpu``, and a number."""

    def __init__(self, kind: str, index: int | None) -> None:
        self.type = kind
        self.index = index


class FakeTensor:
    """What kvwire uses of a torch tensor."""

    def __init__(
        self,
        array: npt.NDArray[Any],
        dtype: str,
        device: str = "cpu",
        index: int | None = None,
    ) -> None:
        self._array = array
        self.dtype = dtype
        self.device = FakeDevice(device, index)
        self.shape = array.shape

    def data_ptr(self) -> int:
        """Address of the first element."""
        return int(self._array.__array_interface__["data"][0])

    def stride(self) -> tuple[int, ...]:
        """Elements from one to the next along each dimension."""
        return tuple(n // self._array.itemsize for n in self._array.strides)

    def element_size(self) -> int:
        return self._array.itemsize
