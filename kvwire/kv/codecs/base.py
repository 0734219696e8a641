"""The contract of a codec: the bytes of one image in, fewer bytes out, and back.

An image is a block's bytes in one piece, in some order of its five axes. A codec sees
the bytes and their :class:`ImageForm`, and no cache, key or file. It runs on a thread:
NumPy and the libraries let go of the interpreter's lock while they work.

What a codec promises:

* ``encode`` writes inside the memory it is given and nowhere else. What does not fit
  there, or is not of its kind, it leaves alone: it returns 0, and the image is kept as
  it is.
* ``decode`` fills the memory it is given exactly, or raises. How much that is follows
  from the form and never from the payload, and nothing larger is allocated.
* A codec that is not ``lossy`` gives back every bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.kv.layout import extents_of
from kvwire.kv.spec import DTYPE_BYTES, DType, KVSpec

Bytes: TypeAlias = npt.NDArray[np.uint8]

FORM_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ImageForm:
    """Describes how the elements of an image lie.

    Attributes:
        dtype: Of one element.
        axes: The five axes, outermost first.
        shape: Elements along each of them.
        digest: 8 bytes that are equal exactly if the rest is.
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
        """Return the elements of an image."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Return the bytes of an image."""
        return self.elements * self.item_bytes

    def places(self, *axes: str) -> tuple[int, ...]:
        """Return where some axes are in ``shape``."""
        return tuple(self.axes.index(axis) for axis in axes)


@lru_cache(1024)
def form_of(spec: KVSpec, axes: tuple[str, ...]) -> ImageForm:
    """Return the form of a block's image in an order of the axes."""
    extents = extents_of(spec)
    return ImageForm(spec.dtype, axes, tuple(extents[axis] for axis in axes))


@dataclass(frozen=True, slots=True)
class BlockCodec(ABC):
    """Turns images into fewer bytes and back.

    Attributes:
        name: How users write it.
        number: What entries name it by, for ever.
        lossy: Whether bits are lost.
    """

    name: str
    number: int
    lossy: ClassVar[bool]

    def require(self) -> None:  # noqa: B027 - most need nothing
        """Import what it needs besides NumPy."""

    @abstractmethod
    def encode(self, image: Bytes, form: ImageForm, into: Bytes) -> int:
        """Encode an image.

        Returns:
            The bytes of ``into`` that were written; 0 if the image is to be kept as it
            is.
        """

    @abstractmethod
    def decode(self, payload: Bytes, form: ImageForm, into: Bytes) -> None:
        """Fill an image, which is as long as the form says.

        Raises:
            IntegrityError: The payload is none of this codec for this form.
            ModuleNotFoundError: See ``require``.
        """
