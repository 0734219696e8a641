"""The destination of one payload, as the receiving side names it."""

from __future__ import annotations

from typing import ClassVar

from kvwire.kv.fragments import Payload


class Landing:
    """The destination of one incoming frame's payload. Subclass it freely.

    Attributes:
        length: Payload bytes that follow the header.
        payload: Their destination, of exactly ``length`` bytes; None drops them.
        anywhere: Whether a link that ``brings_memory`` sets ``payload`` to the memory
            in which they arrived, before ``body_received``; it does not use that memory
            again.
    """

    __slots__ = ("length", "payload")

    anywhere: ClassVar[bool] = False

    def __init__(self, length: int, payload: Payload | None) -> None:
        self.length: int = length
        self.payload: Payload | None = payload
