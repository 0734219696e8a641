"""What messages and regions contain: bytes that tell whose they are and where.

Content is a window on one long random text, and each number has a window of its own.
So bytes that are shifted, mixed, stale or of another request compare unequal.
"""

from __future__ import annotations

import random
from typing import Final

_TEXT_BYTES: Final = 3 * 1024 * 1024
# Prime, so that windows of different numbers never begin at the same byte.
_STRIDE_BYTES: Final = 4099
_LONGEST_BYTES: Final = 1024 * 1024

_TEXT: Final = random.Random(0x6B767769).randbytes(_TEXT_BYTES)


def content(number: int, nbytes: int) -> bytes:
    """The first ``nbytes`` bytes of window ``number``."""
    assert nbytes <= _LONGEST_BYTES
    begin = number * _STRIDE_BYTES % (_TEXT_BYTES - _LONGEST_BYTES)
    return _TEXT[begin : begin + nbytes]
