"""Images with the statistics of KV, and forms of every dtype and order."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.floats import FLOATS, Bytes, as_floats, put_floats
from kvwire.kv.spec import DTYPE_BYTES, KVSpec
from kvwire_store.codecs.base import ImageForm, form_of

ORDERS: Final = tuple(itertools.permutations(("layer", "kv", "token", "head", "dim")))
DTYPES: Final = tuple(sorted(DTYPE_BYTES))


def form(
    dtype: str = "bfloat16", order: int = 0, components: int = 2, head_dim: int = 32
) -> ImageForm:
    """A form of 2 layers, 2 heads and 8 tokens."""
    kind: Any = dtype
    spec = KVSpec(
        layers=2,
        kv_heads=2,
        head_dim=head_dim,
        block_tokens=8,
        dtype=kind,
        components=components,
    )
    return form_of(spec, ORDERS[order])


def image(of: ImageForm, seed: int = 0, scale: float = 1.0) -> Bytes:
    """Normal numbers, and 20 more in every eighth channel, for all tokens."""
    rng = np.random.default_rng(seed)
    if of.dtype not in FLOATS:
        return rng.integers(0, 256, of.nbytes, np.uint8)
    values = rng.normal(size=of.shape).astype(np.float32) * np.float32(scale)
    (dim,) = of.places("dim")
    channels = [slice(None)] * 5
    channels[dim] = slice(None, None, 8)
    values[tuple(channels)] += np.float32(20 * scale)
    made = np.empty(of.nbytes, np.uint8)
    put_floats(values, of.dtype, made)
    return made


def floats(made: Bytes, of: ImageForm) -> npt.NDArray[np.float32]:
    """The numbers of an image, in the shape of its form."""
    return as_floats(made, of.dtype).reshape(of.shape)
