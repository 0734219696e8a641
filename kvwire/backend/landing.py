"""The destination of one payload, as the receiving side names it."""

from __future__ import annotations

from kvwire.kv.fragments import Payload


class Landing:
    """The destination of one incoming frame's payload. Subclass it freely.

    Attributes:
        length: Payload bytes that follow the header.
        payload: Their destination, of exactly ``length`` bytes; None drops them.
    """

    __slots__ = ("length", "payload")

    def __init__(self, length: int, payload: Payload | None) -> None:
        self.length: int = length
        self.payload: Payload | None = payload
