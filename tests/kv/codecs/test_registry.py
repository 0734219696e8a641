"""Codecs by name, and the numbers that are stored."""

from __future__ import annotations

import pytest

from kvwire import UsageError
from kvwire.kv.codecs.registry import CODECS, codec_named


def test_numbers_are_for_ever() -> None:
    numbers = {codec.name: codec.number for codec in CODECS.values()}
    kinds = {codec.name: codec.lossy for codec in CODECS.values()}
    assert numbers == {
        "zstd-planes": 1,
        "lz4-planes": 2,
        "fp8": 3,
        "int8": 4,
        "int4": 5,
    }
    assert [name for name, lossy in kinds.items() if not lossy] == [
        "zstd-planes",
        "lz4-planes",
    ]


def test_a_typo_names_the_nearest() -> None:
    assert codec_named("int8") is CODECS["int8"]
    with pytest.raises(UsageError, match="did you mean 'zstd-planes'"):
        codec_named("zstd-plane")
