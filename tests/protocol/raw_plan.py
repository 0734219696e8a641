"""Computes what a KV transfer carries and in which order, from the pages alone.

Written from docs/topics/protocol-kv-transfers.md, with nothing of kvwire:
element by element, and without any care for speed.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

AXES = ("layer", "block", "kv", "token", "head", "dim")
ITEM_BYTES = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8"), 1),
    **dict.fromkeys(("bfloat16", "float16"), 2),
    "float32": 4,
}
NUMBERS = (
    *("layers", "kv_heads", "head_dim", "block_tokens", "components"),
    *("shard_rank", "shard_size", "model_kv_heads", "first_layer", "model_layers"),
)
EQUAL = ("model_layers", "model_kv_heads", "head_dim", "components")

Box = tuple[int, int, int, int, int]
"""(group, first layer, layers, first granule, granules)"""


class Misfit(Exception):
    """Two descriptions do not fit together, or one of them is wrong."""


class Element(NamedTuple):
    """One element by the model's indices; ``token`` counts in the request."""

    layer: int
    token: int
    kv: int
    head: int
    dim: int


class Share:
    """One side's share of a group: an entry of its geometry."""

    def __init__(
        self,
        name: str,
        spec: Sequence[tuple[str, str]],
        order: str,
        blocks: int,
        tokens: int | None,
    ) -> None:
        self.encoded = [name, spec, order, blocks, tokens]
        texts = dict(spec)
        if not all(texts.get(key, "").isdigit() for key in NUMBERS):
            raise Misfit(f"spec {texts}")
        self.name, self.order = name, tuple(order.split())
        self.blocks, self.tokens = blocks, tokens
        self.weights = (texts["dtype"], texts["fingerprint"])
        self.item_bytes = ITEM_BYTES[texts["dtype"]]
        self.n = n = {key: int(texts[key]) for key in NUMBERS}
        replicas = n["shard_size"] // (n["model_kv_heads"] // n["kv_heads"])
        head = n["shard_rank"] // replicas * n["kv_heads"]
        self.heads = range(head, head + n["kv_heads"])
        self.layers = range(n["first_layer"], n["first_layer"] + n["layers"])
        inner = (n["components"], n["block_tokens"], n["kv_heads"], n["head_dim"])
        self.extents = dict(zip(AXES, (n["layers"], blocks, *inner), strict=True))

    @property
    def capacity(self) -> int:
        """The valid tokens of the list, as far as this side says."""
        full = self.blocks * self.n["block_tokens"]
        return full if self.tokens is None else self.tokens


@dataclass
class Carried:
    """What a transfer carries of one group, and in which order."""

    name: str
    layers: range
    heads: range
    components: int
    head_dim: int
    item_bytes: int
    tokens: int
    granule_tokens: int
    granules: int
    moved: Sequence[bool] = ()
    order: tuple[str, ...] = AXES

    @property
    def extents(self) -> dict[str, int]:
        """How many steps each axis has."""
        outer = (len(self.layers), self.granules, self.components)
        inner = (self.granule_tokens, len(self.heads), self.head_dim)
        return dict(zip(AXES, (*outer, *inner), strict=True))

    def nbytes(self, box: Box) -> int:
        inner = math.prod(self.extents[axis] for axis in AXES[2:])
        return box[2] * len(self._granules(box)) * inner * self.item_bytes

    def elements(self, box: Box) -> Iterator[Element]:
        """Yields the elements of a segment in canonical order."""
        values: dict[str, Sequence[int]] = {
            "layer": range(box[1], box[1] + box[2]),
            "block": self._granules(box),
            "kv": range(self.components),
            "token": range(self.granule_tokens),
            "head": self.heads,
            "dim": range(self.head_dim),
        }
        places = itertools.product(*(values[axis] for axis in self.order))
        where = [self.order.index(axis) for axis in AXES]
        for place in places:
            layer, granule, kv, token, head, dim = (place[at] for at in where)
            token += granule * self.granule_tokens
            yield Element(layer, token, kv, head, dim)

    def text(self) -> str:
        """Writes the group as the plan has it."""
        numbers = (
            *(self.layers.start, self.layers.stop, self.heads.start, self.heads.stop),
            *(self.components, self.head_dim, self.item_bytes),
            *(self.tokens, self.granule_tokens, self.granules),
        )
        listed = ", ".join(map(str, numbers))
        return f"('{self.name}', '{' '.join(self.order)}', {listed})"

    def _granules(self, box: Box) -> list[int]:
        return [g for g in range(box[3], box[3] + box[4]) if self.moved[g]]


def carried(
    producer: Sequence[Share], consumer: Sequence[Share], have: Mapping[str, bytes]
) -> list[Carried]:
    """Computes what a transfer carries, group by group."""
    if [share.name for share in producer] != [share.name for share in consumer]:
        raise Misfit("the groups differ")
    pairs = zip(producer, consumer, strict=True)
    return [_group(p, c, have.get(p.name, b"")) for p, c in pairs]


def plan_text(groups: Sequence[Carried]) -> str:
    """Writes the text under the digest of the plan."""
    listed = ", ".join(group.text() for group in groups)
    return f"({listed}{',' if len(groups) == 1 else ''})"


def plan_digest(groups: Sequence[Carried]) -> bytes:
    """Computes the plan that AGREE names."""
    data = plan_text(groups).encode()
    for group in groups:
        bits = "".join("01"[moved] for moved in group.moved)
        bits += "0" * (-len(bits) % 8)
        data += bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8))
    return hashlib.sha256(data).digest()[:16]


def hashes_digest(hashes: Mapping[str, Sequence[bytes]]) -> bytes:
    """Computes what a description says of the hashes of blocks; nothing of none."""
    data = b""
    for name, listed in hashes.items():
        data += b"%d:%s" % (len(listed), name.encode())
        data += b"".join(b"%d:%s" % (len(one), one) for one in listed)
    return hashlib.sha256(data).digest() if hashes else b""


def bitmap(bits: Sequence[bool]) -> bytes:
    """Writes ``have`` of one group."""
    value = sum(1 << place for place, bit in enumerate(bits) if bit)
    return value.to_bytes(-(-len(bits) // 8), "little")


def _group(producer: Share, consumer: Share, have: bytes) -> Carried:
    p, c = producer.n, consumer.n
    differing = [name for name in EQUAL if p[name] != c[name]]
    layers = _common(producer.layers, consumer.layers)
    heads = _common(producer.heads, consumer.heads)
    if differing or producer.weights != consumer.weights or not (layers and heads):
        raise Misfit(f"{producer.name}: {differing}, layers {layers}, heads {heads}")
    sides = (producer, consumer)
    tokens = min(side.capacity for side in sides)
    given = {side.tokens for side in sides if side.tokens is not None}
    if len(given) > 1 or any(
        -(-tokens // side.n["block_tokens"]) != side.blocks for side in sides
    ):
        raise Misfit(f"{producer.name}: the lists are not of the same tokens")
    size = math.gcd(p["block_tokens"], c["block_tokens"])
    group = Carried(
        *(producer.name, layers, heads, p["components"], p["head_dim"]),
        *(producer.item_bytes, tokens, size, -(-tokens // size)),
    )
    held, per_block = int.from_bytes(have, "little"), c["block_tokens"] // size
    group.moved = [not held >> g // per_block & 1 for g in range(group.granules)]
    group.order = min(
        (side.order for side in sides),
        key=lambda order: sum(_pieces(order, group.extents, side) for side in sides),
    )
    return group


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _pieces(order: Sequence[str], extents: Mapping[str, int], side: Share) -> int:
    steps: dict[str, int] = {}
    step = 1
    for axis in itertools.takewhile(lambda axis: axis != "block", side.order[::-1]):
        steps[axis] = step
        step *= side.extents[axis]
    run = 1
    for axis in (axis for axis in order[::-1] if extents[axis] != 1):
        if steps.get(axis) != run:
            break
        run *= extents[axis]
    return math.prod(extents.values()) // run
