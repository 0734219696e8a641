"""Sizes as people say them."""

from __future__ import annotations

import pytest

from kvwire.limits import GIB, TIB
from kvwire.types import in_bytes


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (4096, "4 KiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (2 * TIB, "2 TiB"),
    ],
)
def test_sizes(count: int, said: str) -> None:
    assert in_bytes(count) == said
