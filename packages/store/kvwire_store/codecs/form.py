"""The form of an image: what a codec knows of the bytes of one block.

An image is the bytes of one block in one piece, in some order of its five axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Final

from kvwire.kv.layout import extents_of
from kvwire.kv.spec import DTYPE_BYTES, DType, KVSpec

FORM_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The element type, axes and shape of an image.

    Attributes:
        dtype: The type of one element.
        axes: The five axes, outermost first.
        shape: Elements along each of them.
        digest: 8 bytes, equal for equal forms.
    """

    dtype: DType
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    digest: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        named = sha256(repr((self.dtype, self.axes, self.shape)).encode())
        object.__setattr__(self, "digest", named.digest()[:FORM_BYTES])

    @property
    def elements(self) -> int:
        """Return the number of elements of an image."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Return the length of an image in bytes."""
        return self.elements * self.item_bytes


@lru_cache(1024)
def form_of(spec: KVSpec, axes: tuple[str, ...]) -> ImageForm:
    """Return the form of an image that has its axes in this order."""
    extents = extents_of(spec)
    return ImageForm(spec.dtype, axes, tuple(extents[axis] for axis in axes))
