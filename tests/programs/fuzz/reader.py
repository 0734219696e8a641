"""Reads decisions out of bytes: any bytes are some decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

# What sizes, numbers and offsets go wrong at.
EDGES: Final = tuple(
    sorted(
        {2**n + d for n in (7, 8, 15, 16, 31, 32, 36, 62, 63, 64) for d in (-1, 0, 1)}
    )
)


class Reader:
    """Takes values from the front; when there is nothing left, zeros."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        """0 to 255."""
        if not self:
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def take(self, size: int) -> bytes:
        """So many bytes, or what is left of them."""
        taken = self._data[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def short(self) -> bytes:
        """Some bytes, with their number in front."""
        return self.take(self.byte())

    def number(self) -> int:
        """A small number, or an edge."""
        value = self.byte()
        return value if value < 128 else EDGES[value % len(EDGES)]

    def pick(self, among: Sequence[T]) -> T:
        return among[self.byte() % len(among)]
