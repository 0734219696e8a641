"""The contract of a block codec: encode one image into fewer bytes, and decode it.

An image is the bytes of one block in one piece, in some order of its five axes. A codec
sees these bytes and their :class:`ImageForm`, but no cache, key or file. It runs on a
thread: NumPy and the compression libraries release the interpreter's lock as they work.

A codec promises:

* ``encode`` writes only into the memory it is given. If the result does not fit there,
  or the elements are not of a supported type, it returns 0, and the caller keeps the
  image as it is.
* ``decode`` fills the memory it is given exactly, or raises. The size follows from the
  form and never from the payload, and nothing larger is allocated.
* Decoding restores every bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Final

from kvwire.kv.floats import Bytes
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

    def places(self, *axes: str) -> tuple[int, ...]:
        """Return the positions of these axes in ``shape``."""
        return tuple(self.axes.index(axis) for axis in axes)


@lru_cache(1024)
def form_of(spec: KVSpec, axes: tuple[str, ...]) -> ImageForm:
    """Return the form of an image that has its axes in this order."""
    extents = extents_of(spec)
    return ImageForm(spec.dtype, axes, tuple(extents[axis] for axis in axes))


@dataclass(frozen=True, slots=True)
class BlockCodec(ABC):
    """A codec of block images; the module's docstring lists its promises.

    Attributes:
        name: The name that users write.
        number: The number in stored entries; it never changes.
    """

    name: str
    number: int

    def require(self) -> None:  # noqa: B027 - most need nothing
        """Import the libraries that this codec needs besides NumPy.

        Raises:
            ModuleNotFoundError: A library is missing; the message names it.
        """

    @abstractmethod
    def encode(self, image: Bytes, form: ImageForm, into: Bytes) -> int:
        """Encode an image.

        Returns:
            The number of bytes written to ``into``; 0 if the caller should keep the
            image as it is.
        """

    @abstractmethod
    def decode(self, payload: Bytes, form: ImageForm, into: Bytes) -> None:
        """Decode a payload into an image, whose length follows from the form.

        Raises:
            IntegrityError: The payload is not one of this codec for this form.
            ModuleNotFoundError: See ``require``.
        """
