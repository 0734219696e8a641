"""kvwire at one end of a connection and the raw client at the other, with a cache each.

Every element has a stamp that says where it belongs, and what nobody has written is
FREE, so each test compares every element of every block.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.kv.spec import DType
from tests.protocol.raw_client import RawCache, RawLink, Side, answer, ask
from tests.protocol.raw_plan import ITEM_BYTES, Box, Element, Share

TOKENS, LAYERS, HEADS, DIM = 22, 2, 2, 2
POOL = 12
FREE = 255


def elements(dim: int = DIM) -> list[Element]:
    """Every element of the request."""
    places = itertools.product(*map(range, (LAYERS, TOKENS, 2, HEADS, dim)))
    return list(itertools.starmap(Element, places))


def stamps(
    landed: Callable[[Element], bool] = lambda element: True, dim: int = DIM
) -> list[int]:
    """What lies at the place of each element when these have landed."""
    return [
        sum(map(operator.mul, element, (89, 7, 59, 23, 3))) % FREE
        if landed(element)
        else FREE
        for element in elements(dim)
    ]


class Ours:
    """A cache of kvwire, one tensor for each layer, in either of the short layouts."""

    def __init__(
        self,
        layout: Literal["NHD", "HND"] = "NHD",
        block_tokens: int = 4,
        *,
        dim: int = DIM,
        dtype: DType = "uint8",
    ) -> None:
        spec = kvwire.KVSpec(
            layers=LAYERS,
            kv_heads=HEADS,
            head_dim=dim,
            block_tokens=block_tokens,
            dtype=dtype,
            fingerprint="model",
        )
        inner = {"NHD": (block_tokens, HEADS), "HND": (HEADS, block_tokens)}[layout]
        shape = (LAYERS, POOL, 2, *inner, dim)
        self._bytes = np.full((*shape, spec.item_bytes), FREE, np.uint8)
        tensors = list(self._bytes.view(np.dtype(dtype))[..., 0])
        self.cache = kvwire.PagedCache(spec, tensors, layout=layout)
        self.ids = list(range(POOL))[::-1][: -(-TOKENS // block_tokens)]
        self.names = [("kv", block) for block in self.ids]
        self._elements = elements(dim)
        self._heads_first, self._block_tokens = layout == "HND", block_tokens

    def fill(self) -> None:
        """Writes the stamp of each element."""
        values = stamps(dim=self._bytes.shape[-2])
        for element, value in zip(self._elements, values, strict=True):
            self._item(element)[:] = value

    def values(self) -> list[int]:
        """Reads the stamp of each element; FREE if its bytes are not alike."""
        items = map(self._item, self._elements)
        return [int(item[0]) if (item == item[0]).all() else FREE for item in items]

    def _item(self, e: Element) -> npt.NDArray[np.uint8]:
        position, token = divmod(e.token, self._block_tokens)
        inner = (e.head, token) if self._heads_first else (token, e.head)
        item: npt.NDArray[np.uint8]
        item = self._bytes[e.layer, self.ids[position], e.kv, *inner, e.dim]
        return item


class Theirs:
    """A cache of the client, nested in any order; numbers of its spec as given."""

    def __init__(
        self,
        order: str = "layer block kv head token dim",
        block_tokens: int = 8,
        *,
        dim: int = DIM,
        dtype: DType = "uint8",
        **spec: int,
    ) -> None:
        numbers = {
            "layers": LAYERS,
            "kv_heads": HEADS,
            "head_dim": dim,
            "block_tokens": block_tokens,
            "components": 2,
            "shard_rank": 0,
            "shard_size": 1,
            "model_kv_heads": HEADS,
            "first_layer": 0,
            "model_layers": LAYERS,
        } | spec
        pairs = [(name, str(number)) for name, number in numbers.items()]
        pairs += [("dtype", dtype), ("fingerprint", "model")]
        blocks = -(-TOKENS // block_tokens)
        share = Share("kv", pairs, order, blocks, TOKENS)
        self.raw = RawCache(share, list(range(POOL))[2 : 2 + blocks], POOL)
        self.raw.memory[:] = bytes([FREE]) * len(self.raw.memory)
        self._elements = elements(dim)
        self._dim, self._item_bytes = dim, ITEM_BYTES[dtype]

    def fill(self) -> None:
        """Writes the stamp of each element."""
        for element, value in zip(self._elements, stamps(dim=self._dim), strict=True):
            place = self.raw.place(element)
            self.raw.memory[place] = bytes([value]) * self._item_bytes

    def values(self) -> list[int]:
        """Reads the stamp of each element; FREE if its bytes are not alike."""
        held, items = self.raw.share.heads, self.raw.memory
        found = [items[self.raw.place(e)] for e in self._elements if e.head in held]
        values = iter([item[0] if len(set(item)) == 1 else FREE for item in found])
        return [next(values) if e.head in held else FREE for e in self._elements]

    def side(self, *, producer: bool, **more: Any) -> Side:
        """The client's side of a transfer called "x"."""
        return Side(id=b"sx", cache=self.raw, producer=producer, **more)


@dataclass
class World:
    """Both ends of a connection.

    Attributes:
        ours: kvwire; it listens at ``address``.
    """

    ours: kvwire.Communicator
    address: kvwire.Address
    connection: kvwire.Connection
    link: RawLink


@asynccontextmanager
async def world(
    psk: bytes = b"", *, hostile: bool = False, **config: Any
) -> AsyncIterator[World]:
    """Connects the client to a communicator; closes both in order at the end.

    But not where it is hostile: then the connection ends as it has it.
    """
    async with kvwire.open(name="ours", **config) as ours:
        address = await ours.listen("tcp://127.0.0.1:0")
        link = await RawLink.connect(address.host, address.port, psk=psk)
        w = World(ours, address, await anext(ours.connections()), link)
        try:
            yield w
            if not hostile:
                await w.link.close()
        finally:
            w.link.abort()


async def expected(
    w: World, ours: Ours, theirs: Theirs
) -> tuple[kvwire.Incoming, Side]:
    """Has kvwire expect all of the client's cache, which asks to produce it."""
    theirs.fill()
    inc = w.ours.expect("x", ours.cache, ours.ids, tokens=TOKENS)
    side = theirs.side(producer=True)
    await ask(w.link, side, 1)
    return inc, side


async def begun(link: RawLink, side: Side, request: int) -> int:
    """Asks with this number, or answers if it is 0; returns the number."""
    if not request:
        return await answer(link, side)
    await ask(link, side, request)
    return request


def layers_of(side: Side) -> list[Box]:
    """Everything that is carried, as one box for each layer."""
    (group,) = side.groups
    return [(0, layer, 1, 0, group.granules) for layer in group.layers]
