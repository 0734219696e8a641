"""Caches with known contents, for the tests of the store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvwire import KVSpec, PagedCache
from kvwire.kv.layout import Layout

Array = npt.NDArray[Any]

SPEC = KVSpec(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")
"""Of 512 bytes a block, so a slot of a store is one grain."""

LARGE = KVSpec(layers=4, kv_heads=4, head_dim=64, block_tokens=16, dtype="float16")
"""Of 64 KiB a block, so that a few hundred of them take a while."""


def chain(count: int, name: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count)]


@dataclass
class Filled:
    blocks: int = 16
    spec: KVSpec = SPEC
    layout: Layout = "NHD"
    seed: int | None = None
    tensors: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        extents = {"token": spec.block_tokens, "head": spec.kv_heads}
        inner = ("token", "head") if self.layout == "NHD" else ("head", "token")
        shape = (
            *(self.blocks, spec.components),
            *(extents[axis] for axis in inner),
            spec.head_dim,
        )
        stored = {1: np.uint8, 2: np.uint16, 4: np.uint32}[spec.item_bytes]
        # NumPy has no bfloat16 and no float8: such caches are kept as integers.
        known = spec.dtype in ("float16", "float32", "int8")
        as_type = np.dtype(spec.dtype) if known else np.dtype(stored)
        rng = np.random.default_rng(self.seed)
        self.tensors = [
            np.zeros(shape, stored).view(as_type)
            if self.seed is None
            else rng.integers(0, 256, (*shape[:-1], shape[-1] * spec.item_bytes))
            .astype(np.uint8)
            .view(as_type)
            for _ in range(spec.layers)
        ]

    @property
    def cache(self) -> PagedCache:
        return PagedCache(self.spec, self.tensors, self.layout)

    def tokens(self, blocks: list[int]) -> Array:
        """The tokens of some blocks: (layer, component, token, head, bytes)."""
        raw = np.stack([tensor.view(np.uint8)[blocks] for tensor in self.tensors])
        axes = (0, 2, 1, 3, 4, 5) if self.layout == "NHD" else (0, 2, 1, 4, 3, 5)
        together = raw.transpose(axes)
        return together.reshape(*together.shape[:2], -1, *together.shape[4:])
