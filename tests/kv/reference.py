"""A slow model of a KV cache, obviously right: element by element, in Python loops.

Nothing here uses kvwire's layouts, strides or planner; of a plan only the nesting of
its axes is read, to say in which order the bytes have to come.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvwire.kv.canonical import Canonical
from kvwire.kv.layout import AxisOrder
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import Segment
from kvwire.kv.spec import KVSpec

Array = npt.NDArray[Any]

AXES = ("layer", "block", "kv", "token", "head", "dim")

STORED_AS = {
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float32": np.float32,
    "float8_e4m3fn": np.uint8,
    "int8": np.int8,
    "uint8": np.uint8,
}
"""A NumPy type that a cache of each element type can be kept in."""


class Element(NamedTuple):
    """One element by the model's indices; ``token`` counts in the request."""

    layer: int
    token: int
    kv: int
    head: int
    dim: int

    @property
    def stamp(self) -> int:
        """A value that few elements share, and that every dtype can hold."""
        place = self.layer
        for step, extent in zip(self[1:], (61, 2, 5, 7), strict=True):
            place = place * extent + step
        return place % 113 + 1


@dataclass(frozen=True)
class Shape:
    """How one side keeps its tensors.

    Attributes:
        form: "layers", one tensor for each; "cross", one for all; "pairs", (keys,
            values) for each layer; or "views", one for each layer out of one for all.
        index: The axes of each dimension of its tensors.
        padded: An axis whose allocation is longer than its tensors.
    """

    form: str
    memory: tuple[str, ...]
    index: tuple[tuple[str, ...], ...]
    padded: str = ""


class Store:
    """One side's tensors and where each element is in them."""

    def __init__(self, spec: KVSpec, blocks: int, shape: Shape) -> None:
        self.spec = spec
        self.shape = shape
        self.extents = {
            "layer": spec.layers,
            "block": blocks,
            "kv": spec.components,
            "token": spec.block_tokens,
            "head": spec.kv_heads,
            "dim": spec.head_dim,
        }
        count = {"layers": spec.layers, "pairs": spec.layers * 2}.get(shape.form, 1)
        self.raw = [self._allocate() for _ in range(count)]

    def _allocate(self) -> Array:
        sizes = [
            self.extents[axis] + (axis == self.shape.padded)
            for axis in self.shape.memory
        ]
        return np.zeros(sizes, STORED_AS[self.spec.dtype])

    def tensors(self) -> Any:
        """What a caller passes to PagedCache."""
        axes = [axis for dim in self.shape.index for axis in dim]
        found = []
        for raw in self.raw:
            inside = raw[tuple(slice(self.extents[a]) for a in self.shape.memory)]
            # Axes that the layout leaves out have one element.
            kept = [a for a in self.shape.memory if a in axes]
            dropped = tuple(i for i, a in enumerate(self.shape.memory) if a not in axes)
            plain = inside.squeeze(dropped).transpose([kept.index(a) for a in axes])
            sizes = [
                int(np.prod([self.extents[a] for a in dim])) for dim in self.shape.index
            ]
            tensor = plain.reshape(sizes)
            assert np.shares_memory(tensor, raw)
            found.append(tensor)
        if self.shape.form == "cross":
            return found[0]
        if self.shape.form == "views":
            at = axes.index("layer")
            every = range(self.spec.layers)
            return [found[0][(slice(None),) * at + (layer,)] for layer in every]
        if self.shape.form == "pairs":
            return list(zip(found[::2], found[1::2], strict=True))
        return found

    def cache(self) -> PagedCache:
        """The same as kvwire sees it."""
        return PagedCache(self.spec, self.tensors(), AxisOrder(self.layout))

    @property
    def layout(self) -> str:
        """The layout text of the tensors."""
        skip = ("layer",) if self.shape.form == "views" else ()
        dims = [dim for dim in self.shape.index if dim != skip]
        return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)

    def place(self, ids: Sequence[int], element: Element) -> tuple[Array, Any]:
        """The allocation an element is in, and its index there."""
        spec = self.spec
        at = {
            "layer": element.layer - spec.first_layer,
            "block": ids[element.token // spec.block_tokens],
            "kv": element.kv,
            "token": element.token % spec.block_tokens,
            "head": element.head - spec.heads.start,
            "dim": element.dim,
        }
        which = {"layers": at["layer"], "pairs": at["layer"] * 2 + at["kv"]}
        raw = self.raw[which.get(self.shape.form, 0)]
        return raw, tuple(at[axis] for axis in self.shape.memory)

    def elements(self, blocks: int) -> Iterator[Element]:
        """Every element in the first ``blocks`` blocks of a list."""
        spec = self.spec
        return itertools.starmap(
            Element,
            itertools.product(
                spec.layer_indices,
                range(blocks * spec.block_tokens),
                range(spec.components),
                spec.heads,
                range(spec.head_dim),
            ),
        )

    def fill(self, ids: Sequence[int]) -> None:
        """Stamp every element that a block list covers."""
        for element in self.elements(len(ids)):
            raw, at = self.place(ids, element)
            raw[at] = element.stamp

    def copy(self) -> Store:
        """The same shape with allocations of its own."""
        return copy.deepcopy(self)


def walk_elements(walk: Canonical, segment: Segment) -> Iterator[Element]:
    """The elements of a segment in canonical order."""
    steps = {
        "layer": segment.layer_range,
        "block": range(segment.granule, segment.granule + segment.granules),
        "kv": range(walk.components),
        "token": range(walk.granule_tokens),
        "head": walk.heads,
        "dim": range(walk.head_dim),
    }
    for at in itertools.product(*(steps[axis] for axis in walk.order)):
        named = dict(zip(walk.order, at, strict=True))
        token = named["block"] * walk.granule_tokens + named["token"]
        yield Element(named["layer"], token, named["kv"], named["head"], named["dim"])


def read_walk(
    store: Store, ids: Sequence[int], walk: Canonical, segment: Segment
) -> bytes:
    """The bytes of a segment, one element after the other."""
    parts = []
    for element in walk_elements(walk, segment):
        raw, at = store.place(ids, element)
        parts.append(raw[at].tobytes())
    return b"".join(parts)


def plain_shape(layout: str, *, form: str = "layers") -> Shape:
    """A shape whose memory is as its layout says, such as ``"block head (kv dim)"``."""
    words = re.findall(r"\(([^)]*)\)|(\S+)", layout)
    dims = [tuple((folded or plain).split()) for folded, plain in words]
    axes = tuple(axis for dim in dims for axis in dim)
    absent = tuple(a for a in AXES if a not in axes and a not in _outside(form))
    return Shape(form, absent + axes, tuple(dims))


def _outside(form: str) -> tuple[str, ...]:
    """The axes that are not inside one allocation."""
    return {"layers": ("layer",), "pairs": ("layer", "kv")}.get(form, ())


LAYOUTS = {
    "NHD": plain_shape("block kv token head dim"),
    "HND": plain_shape("block kv head token dim"),
    "kv first": plain_shape("kv block token head dim"),
    "packed": plain_shape("block head token (kv dim)"),
    "slots": plain_shape("kv (block token) head dim"),
    "apart": plain_shape("block token head dim", form="pairs"),
    "cross NHD": plain_shape("block layer kv token head dim", form="cross"),
    "cross HND": plain_shape("block layer kv head token dim", form="cross"),
    "layer first": plain_shape("layer kv block token head dim", form="cross"),
    "layer last": plain_shape("block token kv head layer dim", form="cross"),
    "kv outermost": plain_shape("kv layer block token head dim", form="cross"),
    "views": plain_shape("block layer kv token head dim", form="views"),
}
"""What the engines have, by the names of the field."""
_LATENT = [
    plain_shape("block token dim"),
    plain_shape("block layer token dim", form="cross"),
]


@st.composite
def shapes(draw: st.DrawFn, spec: KVSpec) -> Shape:
    """A layout that engines have, or any: form, nesting, folding, padding."""
    if draw(st.booleans()):
        # A view of one layer would be single elements if a token were one.
        fits = {
            "pairs": spec.components > 1,
            "views": spec.layer_block_bytes > spec.item_bytes,
        }
        known = [s for s in LAYOUTS.values() if fits.get(s.form, True)]
        latent = spec.components == spec.kv_heads == 1
        return draw(st.sampled_from(known + _LATENT * latent))
    forms = ["layers", "cross", "views"] + ["pairs"] * (spec.components == 2)
    form = draw(st.sampled_from(forms))
    inside = [axis for axis in AXES if axis not in _outside(form)]
    memory = draw(st.permutations(inside))
    wide = {
        "token": spec.block_tokens,
        "head": spec.kv_heads,
        "dim": spec.head_dim,
        "kv": spec.components,
    }
    if form == "views":
        # Were it the innermost, a view of one layer would be single elements.
        memory.remove("layer")
        inside_another = any(wide.get(axis, 1) > 1 for axis in memory[1:])
        memory.insert(draw(st.integers(0, inside_another)), "layer")
    single = {
        "layer": spec.layers == 1 and form == "cross",
        "kv": spec.components == 1,
        "head": spec.kv_heads == 1,
    }
    left_out = {a for a, one in single.items() if one and draw(st.booleans())}
    paddable = [a for a in inside if wide.get(a, 1) > 1]
    padded = draw(st.sampled_from(["", *paddable]))
    kept = [axis for axis in memory if axis not in left_out]
    if padded or form == "views" or draw(st.booleans()):
        order = draw(st.permutations(kept))
        return Shape(form, tuple(memory), tuple((axis,) for axis in order), padded)
    dims: list[tuple[str, ...]] = []
    for axis in kept:
        fold = bool(dims) and draw(st.booleans())
        dims[-1:] = [(*dims[-1], axis)] if fold else [*dims[-1:], (axis,)]
    return Shape(form, tuple(memory), tuple(dims), padded)
