"""The content of a KV cache: the model's geometry, and this cache's share of it.

There are two kinds of fields. *Geometry* (layers, KV heads, head dim, dtype,
components, fingerprint) describes the model and must be the same at both peers;
:meth:`KVSpec.differing` names the fields that are not. *Placement* (block size, shard,
first layer) describes how one side stores it. It may differ, because the planner maps
both sides' memory onto one byte order.

``kv_heads`` and ``layers`` count the heads and layers in *this* cache's tensors. Their
indices in the model follow from the shard:

* Split heads. ``kv_heads=2, shard=(1, 4)`` means heads 2 and 3 of a model with 8.
* Replicated heads. If there are more shards than heads, several shards hold the same
  heads, and ``model_kv_heads`` is the number of heads in the model: ``kv_heads=1,
  shard=(5, 8), model_kv_heads=4`` means head 2, which shard 4 holds too. With MLA
  (``components=1, kv_heads=1``) every shard holds the one latent head, even without
  ``model_kv_heads``.
* Recurrent states (Mamba, linear attention, short convolutions). ``kind="state"`` has
  ``head_dim`` bytes per layer instead of tokens: a summary of all tokens up to one
  position. A part of a state is useless, and so is a state for another position.
* Pipeline stages. ``layers=16, first_layer=16, model_layers=32`` means the second of
  two stages.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from kvwire import limits
from kvwire.errors import ProfileMismatch, UsageError, is_name, nearest, wrong_name
from kvwire.types import plain

# Limits for a peer's description of its cache. Today's largest models have 128 layers,
# 128 KV heads and heads of 576 elements; tensor parallelism stays below 1024.
KV_HEADS_MAX: Final = 4096
KV_HEAD_DIM_MAX: Final = 65_536
KV_SHARDS_MAX: Final = 4096
# A recurrent state of one layer; models of 2026 have up to 20 MiB.
KV_STATE_BYTES_MAX: Final = 1024 * limits.MIB
# Digits of the largest number that a peer's description may have.
_DIGITS_MAX: Final = len(str(KV_STATE_BYTES_MAX))

DType: TypeAlias = Literal[
    "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"
]
DTYPE_BYTES: Final[dict[str, int]] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""The bytes of each element type. Elements are moved, never converted."""
Kind: TypeAlias = Literal["tokens", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The contents of one KV cache, or of one group of a hybrid cache.

    Attributes:
        layers: The number of layers in this cache.
        kv_heads: The number of KV heads per layer in this cache, that is, in its shard.
        head_dim: The elements per head and token; for MLA the latent width.
        block_tokens: Tokens per block.
        dtype: The element type, a key of :data:`DTYPE_BYTES`.
        components: 2 for keys and values, 1 for MLA's latent.
        shard: (rank, size) in the tensor-parallel group over which the heads are split.
        fingerprint: A name for the weights (model, revision), which must be equal at
            both peers.
        model_kv_heads: The KV heads of the whole model; None means ``kv_heads * size``,
            or 1 with MLA.
        first_layer: The model's index of this cache's layer 0.
        model_layers: The layers of the whole model; None means ``first_layer +
            layers``.
        kind: ``"tokens"``, or ``"state"`` for recurrent states: each block is one state
            of ``head_dim`` bytes, with ``dtype="uint8"`` and one component, head and
            token.

    Raises:
        UsageError: A field is out of range, or the shard does not divide the heads.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: DType = "bfloat16"
    components: int = 2
    shard: tuple[int, int] = (0, 1)
    fingerprint: str = ""
    model_kv_heads: int | None = None
    first_layer: int = 0
    model_layers: int | None = None
    kind: Kind = "tokens"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            object.__setattr__(self, name, plain(getattr(self, name)))
        if isinstance(self.shard, tuple):
            object.__setattr__(self, "shard", tuple(map(plain, self.shard)))
        _check_count("layers", self.layers, limits.KV_LAYERS_MAX)
        _check_count("kv_heads", self.kv_heads, KV_HEADS_MAX)
        _check_kind(self)
        _check_count("block_tokens", self.block_tokens, limits.KV_BLOCK_TOKENS_MAX)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if type(self.components) is not int or self.components not in (1, 2):
            raise UsageError(
                f"KVSpec: components={self.components!r}: use 2 for keys and values, "
                "or 1 for MLA"
            )
        _check_fingerprint(self.fingerprint)
        _check_shard(self)
        _check_stage(self)

    @property
    def total_kv_heads(self) -> int:
        """Return the KV heads of the whole model."""
        if self.model_kv_heads is not None:
            return self.model_kv_heads
        latent = self.components == 1 and self.kv_heads == 1
        return 1 if latent else self.kv_heads * self.shard[1]

    @property
    def total_layers(self) -> int:
        """Return the number of layers in the whole model."""
        if self.model_layers is not None:
            return self.model_layers
        return self.first_layer + self.layers

    @property
    def replicas(self) -> int:
        """Return the number of shards that hold the same heads as this one."""
        return self.kv_heads * self.shard[1] // self.total_kv_heads

    @property
    def heads(self) -> range:
        """Return the indices in the model of the heads in this cache."""
        first = self.shard[0] // self.replicas * self.kv_heads
        return range(first, first + self.kv_heads)

    @property
    def layer_indices(self) -> range:
        """Return the indices in the model of the layers in this cache."""
        return range(self.first_layer, self.first_layer + self.layers)

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Return a token's bytes in one layer, over all local components and heads."""
        return self.components * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def layer_block_bytes(self) -> int:
        """Return the bytes of one block in one layer."""
        return self.block_tokens * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block in all layers."""
        return self.layers * self.layer_block_bytes

    def differing(self, other: KVSpec) -> tuple[str, ...]:
        """Return the names of the fields in which two specs of one model differ."""
        mine = _geometry(self)
        theirs = _geometry(other)
        return tuple(name for name in mine if mine[name] != theirs[name])

    def to_pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the spec as (name, value) texts in a fixed order."""
        kind = () if self.kind == "tokens" else (("kind", self.kind),)
        return (
            ("layers", str(self.layers)),
            ("kv_heads", str(self.kv_heads)),
            ("head_dim", str(self.head_dim)),
            ("block_tokens", str(self.block_tokens)),
            ("dtype", self.dtype),
            ("components", str(self.components)),
            ("shard_rank", str(self.shard[0])),
            ("shard_size", str(self.shard[1])),
            ("fingerprint", self.fingerprint),
            ("model_kv_heads", str(self.total_kv_heads)),
            ("first_layer", str(self.first_layer)),
            ("model_layers", str(self.total_layers)),
            *kind,
        )

    @classmethod
    def from_pairs(cls, pairs: object) -> KVSpec:
        """Read a spec that :meth:`to_pairs` wrote; unknown names are ignored.

        Raises:
            UsageError: It is not pairs of texts, a name is missing, or a value is out
                of range.
        """
        values = _texts(pairs)
        numbers = {name: _number(values, name) for name in _NUMBERS}
        rank = numbers.pop("shard_rank")
        size = numbers.pop("shard_size")
        for name in ("dtype", "fingerprint"):
            if name not in values:
                raise UsageError(f"KVSpec: the peer's description lacks {name!r}")
        return cls(
            shard=(rank, size),
            dtype=dtype_name(values["dtype"]),
            fingerprint=values["fingerprint"],
            kind=cast("Kind", values.get("kind", "tokens")),
            **numbers,
        )


_NUMBERS: Final = (
    "layers",
    "kv_heads",
    "head_dim",
    "block_tokens",
    "components",
    "shard_rank",
    "shard_size",
    "model_kv_heads",
    "first_layer",
    "model_layers",
)


_COUNTS: Final = tuple(name for name in _NUMBERS if not name.startswith("shard_"))


def require_same_model(producer: KVSpec, consumer: KVSpec, where: str) -> None:
    """Refuse two caches of which one cannot hold the other's bytes.

    Args:
        producer: The spec of the cache that is sent.
        consumer: The spec of the cache that receives.
        where: The beginning of the error message.

    Raises:
        ProfileMismatch: Fields differ; the message lists the fields with both values.
    """
    fields = producer.differing(consumer)
    if not fields:
        return
    here = _geometry(producer)
    there = _geometry(consumer)
    if "codec=" in producer.fingerprint + consumer.fingerprint and (
        "fingerprint" in fields
    ):
        # A codec changes sizes and types as well, which are no cause of their own.
        fields = ("fingerprint",)
        where = f"pass the same codec= at both ends: {where}"
    pairs = [
        f"{f} is {here[f]!r} at the producer and {there[f]!r} at the consumer"
        for f in fields
    ]
    raise ProfileMismatch(
        f"{where} differs in {', '.join(fields)}: {'; '.join(pairs)}", fields=fields
    )


def _geometry(spec: KVSpec) -> dict[str, int | str]:
    """Return the fields that must be equal, with layers and heads of the model."""
    return {
        # It comes first, because another model or codec explains every other
        # difference.
        "fingerprint": spec.fingerprint,
        "layers": spec.total_layers,
        "kv_heads": spec.total_kv_heads,
        "head_dim": spec.head_dim,
        "dtype": spec.dtype,
        "components": spec.components,
        "kind": spec.kind,
    }


def overlap(a: range, b: range) -> range:
    """Return the intersection of two ranges."""
    return range(max(a.start, b.start), min(a.stop, b.stop))


def dtype_name(dtype: object) -> DType:
    """Return the name of a dtype such as ``"bfloat16"`` or torch's ``torch.bfloat16``.

    Raises:
        UsageError: It is not an element type of :data:`DTYPE_BYTES`.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES and name.startswith("float8_"):
        # A similar name is no remedy: its codes are other numbers.
        raise UsageError(
            f"KVSpec: dtype={str(dtype)!r}: of the formats with 8 bits kvwire knows "
            "float8_e4m3fn and float8_e5m2, and codes of another one are other "
            "numbers; describe its bytes as uint8 (tensor.view(torch.uint8)): they "
            "move as they are, and no codec reads them"
        )
    if name not in DTYPE_BYTES:
        raise UsageError(
            f"KVSpec: dtype={str(dtype)!r} is unknown; {nearest(name, DTYPE_BYTES)}"
        )
    return cast("DType", name)


def _check_count(name: str, value: object, most: int, least: int = 1) -> None:
    if type(value) is not int or not least <= value <= most:
        raise UsageError(
            f"KVSpec: {name}={value!r}: pass a number from {least} to {most}"
        )


def _check_kind(spec: KVSpec) -> None:
    if spec.kind == "tokens":
        _check_count("head_dim", spec.head_dim, KV_HEAD_DIM_MAX)
        return
    if spec.kind != "state":
        raise UsageError(f'KVSpec: kind={spec.kind!r}: use "tokens" or "state"')
    _check_count("head_dim", spec.head_dim, KV_STATE_BYTES_MAX)
    shape = (spec.kv_heads, spec.block_tokens, spec.components, str(spec.dtype))
    if shape != (1, 1, 1, "uint8"):
        raise UsageError(
            'KVSpec: kind="state" needs kv_heads=1, block_tokens=1, components=1 and '
            f"dtype='uint8', not {shape}"
        )


def _check_fingerprint(value: object) -> None:
    if not is_name(value):
        wanted = (
            f"pass a string of at most {limits.NAME_CHARS_MAX} characters, such as a "
            "model's name and revision"
        )
        raise wrong_name("KVSpec: fingerprint", value, wanted)


def _check_shard(spec: KVSpec) -> None:
    shard: object = spec.shard
    if not isinstance(shard, tuple) or len(shard) != 2:
        raise UsageError(f"KVSpec: shard={shard!r}: use (rank, size), such as (0, 1)")
    rank, size = spec.shard
    _check_count("shard size", size, KV_SHARDS_MAX)
    _check_count("shard rank", rank, size - 1, least=0)
    if spec.model_kv_heads is not None:
        _check_count("model_kv_heads", spec.model_kv_heads, KV_HEADS_MAX)
    total = spec.total_kv_heads
    parts = total // spec.kv_heads
    if total % spec.kv_heads or size % parts:
        raise UsageError(
            f"KVSpec: {total} model_kv_heads cannot be split into {size} shards of "
            f"kv_heads={spec.kv_heads}; kv_heads counts the heads of one shard"
        )


def _check_stage(spec: KVSpec) -> None:
    _check_count("first_layer", spec.first_layer, limits.KV_LAYERS_MAX, least=0)
    total = spec.total_layers
    _check_count("model_layers", total, limits.KV_LAYERS_MAX)
    if spec.first_layer + spec.layers > total:
        raise UsageError(
            f"KVSpec: first_layer={spec.first_layer} + layers={spec.layers} is more "
            f"than model_layers={total}"
        )


def _texts(pairs: object) -> dict[str, str]:
    """Return a peer's pairs as a dict, after checking that they are pairs of texts."""
    if not isinstance(pairs, tuple | list) or len(pairs) > limits.PROFILE_FIELDS_MAX:
        raise UsageError("KVSpec: the peer's description is not a list of pairs")
    values: dict[str, str] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError("KVSpec: the peer's description is not a list of pairs")
        name, value = pair
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(
                "KVSpec: the peer's description has values that are not strings"
            )
        values[name] = value
    return values


def _number(values: dict[str, str], name: str) -> int:
    text = values.get(name, "")
    # int() of a long text is slow.
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise UsageError(f"KVSpec: the peer's {name} is {text[:16]!r}, not a number")
    return int(text)


# Every field that both sides must agree on is in the handshake.
assert {f.name for f in dataclasses.fields(KVSpec)} - {"shard"} == (
    {*_NUMBERS, "dtype", "fingerprint", "kind"} - {"shard_rank", "shard_size"}
)
