"""All codecs by name; their numbers are in stored entries, so they never change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvwire.errors import UsageError, nearest, shown
from kvwire_store.codecs.base import BlockCodec
from kvwire_store.codecs.planes import PlanesCodec

CODECS: Final[Mapping[str, BlockCodec]] = {
    codec.name: codec
    for codec in (
        PlanesCodec("zstd-planes", 1, "zstd"),
        PlanesCodec("lz4-planes", 2, "lz4"),
    )
}


def codec_named(name: str) -> BlockCodec:
    """Return the codec with a name that a user wrote.

    Raises:
        UsageError: No codec has this name; the message suggests one.
    """
    try:
        return CODECS[name]
    except KeyError:
        raise UsageError(f"codec={shown(name)}: {nearest(name, CODECS)}") from None
