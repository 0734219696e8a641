"""A tensor that answers as those of torch do, over an array."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy.typing as npt


def torch_like(array: npt.NDArray[Any], dtype: str, device: str = "cpu") -> Any:
    """Make what kvwire uses of a torch tensor."""
    return SimpleNamespace(
        dtype=dtype,
        device=SimpleNamespace(type=device, index=None),
        shape=array.shape,
        data_ptr=lambda: int(array.__array_interface__["data"][0]),
        stride=lambda: tuple(n // array.itemsize for n in array.strides),
        element_size=lambda: array.itemsize,
    )
