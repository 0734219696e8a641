"""vLLM's cache tensors as a :class:`kvwire.PagedCache`.

vLLM gives a worker one tensor for each attention layer. The meaning of its axes follows
from the known sizes of model and engine. Since 0.30 at the latest they are ``(block,
head, token, kv dim)`` for every attention backend, with a token's keys and values side
by side. Only the strides differ. They are read from the tensor, so the layers of a
block may even be interleaved.

A layer with recurrent states has a list of tensors. They are the parts of one state,
lie side by side in a block's page, and are viewed as bytes.

Elements are moved unchanged. An fp8 cache is moved as bytes, the type that vLLM uses.

Cache groups
------------
vLLM has a block table for each kind of layer. The tables share memory: at any time, a
block id belongs to only one table. After a number of computed tokens, decode reads only
some of a table's blocks, such as the last window, chunk or state; these are
:meth:`CacheShape.needed`, and only they are moved.

The layers of one table may differ in heads and head size, as a draft model's layers
differ from the model's. They are then separate cache groups, each with its own
:class:`CacheShape`. Only a worker knows them, because vLLM describes a table to its
scheduler by only one of its layers. So the scheduler's side identifies blocks by table.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import DEFAULT_GROUP
from kvwire.kv.layout import AxisOrder
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import DType, KVSpec, dtype_name
from kvwire.kv.tensors import TensorView, tensor_view


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The layout of a worker's tensors for one cache group, from vLLM's description."""

    block_tokens: int  # tokens of a block
    kv_heads: int  # KV heads of this rank
    total_kv_heads: int  # KV heads of the model; 1 with MLA
    head_dim: int  # elements of a head, or of the MLA latent; bytes of a state
    mla: bool = False  # one latent instead of keys and values
    rank: int = 0  # its rank in the tensor-parallel group
    ranks: int = 1  # the group's size
    first_layer: int = 0  # the model's index of this pipeline stage's first layer
    # The number of layers with a cache in the whole model; None for this stage's alone.
    model_layers: int | None = None
    fingerprint: str = ""  # a name of the weights
    name: str = DEFAULT_GROUP  # the group's name on both engines
    table: int = 0  # the number of the vLLM block table with its blocks
    # vLLM's names for its layers; empty for all layers.
    layers: tuple[str, ...] = ()
    window: int = 0  # tokens in a sliding window; 0 without a window
    chunk: int = 0  # tokens in an attention chunk; 0 without chunks
    state: bool = False  # a recurrent state instead of tokens
    stage: tuple[int, int] = (0, 1)  # (number, count) of the pipeline stage

    @property
    def index(self) -> int:
        """The rank's number among the ranks of all pipeline stages."""
        return self.stage[0] * self.ranks + self.rank

    @property
    def partial(self) -> bool:
        """Whether decode reads only part of a prompt's KV."""
        return bool(self.window or self.chunk or self.state)

    @property
    def profile(self) -> str:
        """A description that must be equal on both engines."""
        if self.state:
            return self.kind
        return f"{self.kind}, {self.total_kv_heads} x {self.head_dim}"

    @property
    def kind(self) -> str:
        """The kind of layer, which determines the blocks of a prompt that are read."""
        if self.state:
            return f"state of {self.head_dim} bytes on {self.ranks} ranks"
        # If only a part moves, both engines must cut the prompt off at the same token.
        if self.window:
            return f"window of {self.window}, by {self.block_tokens}"
        return (
            f"chunks of {self.chunk}, by {self.block_tokens}" if self.chunk else "full"
        )

    def needed(self, tokens: int) -> range:
        """Return the positions of the blocks that the next token reads."""
        first = 0
        if self.state:
            first = tokens - 1
        elif self.window:
            first = max(0, tokens - self.window + 1)
        elif self.chunk:
            first = tokens // self.chunk * self.chunk
        return range(first // self.block_tokens, -(-tokens // self.block_tokens))

    def listed_tokens(self, tokens: int) -> int:
        """Return how many tokens the blocks of :meth:`needed` hold; 1 for a state."""
        if self.state:
            return 1
        needed = self.needed(tokens)
        return tokens - needed.start * self.block_tokens if needed else 0

    def spec(self, *, layers: int, dtype: DType, rank: int | None = None) -> KVSpec:
        """Return the KVSpec for this shape."""
        return KVSpec(
            layers=layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=1 if self.state else self.block_tokens,
            dtype=dtype,
            components=1 if self.mla or self.state else 2,
            shard=(self.rank if rank is None else rank, self.ranks),
            fingerprint=self.fingerprint,
            model_kv_heads=self.total_kv_heads,
            first_layer=self.first_layer,
            model_layers=self.model_layers,
            kind="state" if self.state else "tokens",
        )


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """A worker's caches, and the place of each layer in them."""

    cache: PagedCache  # all layers
    # Each layer's group and its index in the model, by vLLM's name for the layer.
    layers: Mapping[str, tuple[str, int]]


def cache_shapes(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheShape, ...]:
    """Return the shapes of the caches in vLLM's config, one per kind of layer."""
    parallel = vllm_config.parallel_config
    for field in ("decode_context", "prefill_context"):
        size = getattr(parallel, f"{field}_parallel_size", 1)
        if size > 1:
            raise UsageError(
                f"{field}_parallel_size={size}: KvwireConnector supports only 1, "
                "because each rank of such a group holds different tokens"
            )
    _check_scales(vllm_config.cache_config)
    kinds: dict[CacheShape, list[str]] = {}
    for table, layer, spec in layer_specs(kv_cache_config):
        shape = dataclasses.replace(_shape(spec, vllm_config), table=table)
        kinds.setdefault(shape, []).append(layer)
    stages = parallel.pipeline_parallel_size
    if stages > 1 and (len(kinds) > 1 or any(shape.state for shape in kinds)):
        raise UsageError(
            f"pipeline_parallel_size={stages} with "
            f"{'; '.join(shape.kind for shape in kinds)}: KvwireConnector supports "
            "pipeline stages only if all layers of the model are of one kind"
        )
    _check_tables(kinds)
    if len(kinds) == 1:
        return tuple(_of_stage(shape, vllm_config) for shape in kinds)
    return tuple(
        dataclasses.replace(shape, name=f"{index} {shape.kind}", layers=tuple(layers))
        for index, (shape, layers) in enumerate(kinds.items())
    )


def _check_tables(shapes: Iterable[CacheShape]) -> None:
    """Refuse a block table whose layers read different blocks."""
    tables: dict[int, CacheShape] = {}
    for shape in shapes:
        first = tables.setdefault(shape.table, shape)
        if first.kind != shape.kind and not (first.state and shape.state):
            raise UsageError(
                f"vLLM's block table {shape.table} has layers of two kinds "
                f"({first.kind}; {shape.kind}): KvwireConnector needs one kind per "
                "table"
            )


def layer_specs(kv_cache_config: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield block table, name and vLLM's spec of each layer that is transferred."""
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue  # it can be computed from transferred layers
        one = group.kv_cache_spec
        specs = getattr(one, "kv_cache_specs", None) or dict.fromkeys(
            group.layer_names, one
        )
        for layer, spec in specs.items():
            yield table, layer, spec


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the layers of each pipeline stage, as vLLM divides a model by default.

    The remainder goes to the stages before the last.
    """
    sizes = [layers // stages] * stages
    for index in range(layers % stages):
        sizes[-2 - index] += 1
    stops = np.cumsum(sizes).tolist()
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def _of_stage(shape: CacheShape, vllm_config: Any) -> CacheShape:
    """Add the pipeline stage to the shape of a worker's only kind of layer."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    stages = parallel.pipeline_parallel_size
    if stages == 1:
        return shape
    start, stop = model.get_layers_start_end_indices(parallel)
    total = model.get_total_num_hidden_layers()
    number = parallel.rank // shape.ranks % stages
    known = stage_layers(total, stages)[number]
    if (start, stop) != (known.start, known.stop):
        raise UsageError(
            f"stage {number} of {stages} has layers {start} to {stop - 1}, but the "
            f"other engine expects {known.start} to {known.stop - 1}: unset "
            "VLLM_PP_LAYER_PARTITION"
        )
    return dataclasses.replace(
        shape, stage=(number, stages), first_layer=start, model_layers=total
    )


def _check_scales(cache: Any) -> None:
    """Refuse quantised caches whose scales do not come with the weights."""
    dtype = str(cache.cache_dtype)
    if "per_token_head" in dtype or "nvfp4" in dtype:
        raise UsageError(
            f"kv_cache_dtype={dtype}: it stores scales beside each token's values, "
            "and KvwireConnector moves only values; use fp8"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise UsageError(
            "calculate_kv_scales: each engine would calculate its own scales, which "
            "do not fit the other's values; use a checkpoint with scales"
        )


def _shape(spec: Any, vllm_config: Any) -> CacheShape:
    """Return the shape for vLLM's spec of one layer."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    kind = type(spec).__name__
    if hasattr(spec, "shapes"):
        if getattr(spec, "num_speculative_blocks", 0):
            raise UsageError(
                "KvwireConnector does not support speculative decoding with "
                "recurrent states: vLLM moves their blocks while they are being read"
            )
        parts = zip(spec.shapes, spec.dtypes, strict=True)
        return CacheShape(
            block_tokens=spec.block_size,
            kv_heads=1,
            total_kv_heads=1 if getattr(spec, "tp_replicated", False) else ranks,
            head_dim=sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts),
            ranks=ranks,
            state=True,
        )
    for field in ("num_kv_heads", "head_size", "block_size"):
        if not hasattr(spec, field):
            raise UsageError(
                f"KV cache of kind {kind} has no {field}; KvwireConnector supports "
                "attention over blocks and recurrent states"
            )
    if kind in _UNSUPPORTED:
        raise UsageError(f"KV cache of kind {kind}: {_UNSUPPORTED[kind]}")
    mla = any("MLA" in base.__name__ for base in type(spec).__mro__)
    values = getattr(spec, "head_size_v", None)
    if not mla and values not in (None, spec.head_size):
        raise UsageError(
            f"the KV cache has keys of {spec.head_size} elements and values of "
            f"{values}: KvwireConnector needs one size for both"
        )
    # A full layer's spec may have a window too, but the layer keeps every block.
    full = "FullAttention" in kind or "MLAAttention" in kind
    return CacheShape(
        block_tokens=spec.block_size,
        kv_heads=spec.num_kv_heads,
        total_kv_heads=1 if mla else _total_heads(spec, vllm_config),
        head_dim=spec.head_size,
        mla=mla,
        ranks=ranks,
        window=0 if full else getattr(spec, "sliding_window", None) or 0,
        chunk=0 if full else getattr(spec, "attention_chunk_size", None) or 0,
    )


def _total_heads(spec: Any, vllm_config: Any) -> int:
    """Return a layer's number of KV heads on all ranks together.

    If there are more ranks than heads, some ranks hold copies. The number is the
    model's or its draft model's. If it is unclear which, all ranks count as having
    different heads, and only engines with the same number of ranks match.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    speculative = getattr(vllm_config, "speculative_config", None)
    models = [
        vllm_config.model_config,
        getattr(speculative, "draft_model_config", None),
    ]
    known = {model.get_total_num_kv_heads() for model in models if model is not None}
    fitting = {heads for heads in known if spec.num_kv_heads == max(1, heads // ranks)}
    return fitting.pop() if len(fitting) == 1 else int(spec.num_kv_heads * ranks)


_UNSUPPORTED: Final = {
    "CrossAttentionSpec": "it holds an encoder's output, and vLLM itself runs no "
    "encoder-decoder model with a connector",
    "CircularBufferSpec": "its one block is written to again and again",
}


def layer_caches(
    tensors: Mapping[str, Any], shapes: Sequence[CacheShape]
) -> LayerCaches:
    """View a worker's tensors as one cache."""
    if not tensors:
        raise UsageError("vLLM registered no KV cache; there is nothing to transfer")
    groups: dict[str, tuple[KVSpec, list[TensorView], str]] = {}
    layers: dict[str, tuple[str, int]] = {}
    for shape in shapes:
        rows: dict[int, int] = {}
        ordered: list[TensorView] = []
        for name in sorted(shape.layers or tensors, key=layer_index):
            if name not in tensors:
                raise UsageError(f"vLLM registered no KV cache for layer {name!r}")
            view = _layer_view(name, tensors[name], shape)
            # A layer that uses another layer's cache has no row of its own.
            row = rows.setdefault(view.address, len(ordered))
            if row == len(ordered):
                ordered.append(view)
                layers[name] = shape.name, shape.first_layer + row
        _check_stage(shape, len(ordered))
        spec = shape.spec(layers=len(ordered), dtype=dtype_name(ordered[0].dtype))
        layout = find_layout(ordered[0].shape, shape)
        groups[shape.name] = spec, ordered, AxisOrder(layout)
    return LayerCaches(PagedCache.grouped(groups), layers)


def _check_stage(shape: CacheShape, layers: int) -> None:
    """Refuse a pipeline stage with layers that have no cache."""
    number, stages = shape.stage
    if stages > 1 and shape.model_layers:
        known = stage_layers(shape.model_layers, stages)[number]
        if len(known) != layers:
            raise UsageError(
                f"stage {number} of {stages} has {len(known)} layers and {layers} KV "
                "caches: with pipeline stages KvwireConnector needs one per layer "
                "and no draft model"
            )


def find_layout(sizes: Sequence[int], shape: CacheShape) -> str:
    """Return the axis order for a tensor of these sizes."""
    extents = {
        "token": shape.block_tokens,
        "head": shape.kv_heads,
        "dim": shape.head_dim,
        "(kv dim)": 2 * shape.head_dim,
    }
    layouts = _MLA_LAYOUTS if shape.mla else _LAYOUTS
    for layout in ("block dim",) if shape.state else layouts:
        axes = re.findall(r"\(.+?\)|\w+", layout)
        fitting = [*sizes[:1], *(extents[axis] for axis in axes[1:])]
        if fitting == list(sizes):
            return layout
    known = ", ".join(f"{axis} {size}" for axis, size in extents.items())
    raise UsageError(
        f"a KV cache tensor has shape {tuple(sizes)}, which fits no known axis order "
        f"with {known}; not supported are blocks that the attention backend splits "
        "(--block-size) and quantised caches with their own scales"
    )


# The first one that fits is used. If there are as many heads as tokens, two layouts of
# one length fit; the choice matters only to a peer whose backend has the other one.
_LAYOUTS: Final = (
    "block head token (kv dim)",  # vLLM 0.30 to 0.33
    "block token head (kv dim)",
)
_MLA_LAYOUTS: Final = ("block token dim", "block head token dim")


def layer_index(name: str) -> tuple[list[int], str]:
    """Return a sort key that puts layer 10 behind layer 9."""
    return [int(digits) for digits in re.findall(r"\d+", name)], name


def _layer_view(name: str, tensor: Any, shape: CacheShape) -> TensorView:
    """View a layer's cache; recurrent states become bytes."""
    if not shape.state:
        if isinstance(tensor, list | tuple):
            raise UsageError(
                f"layer {name!r} has {len(tensor)} state tensors, but vLLM's config "
                "describes it as attention over blocks"
            )
        return tensor_view(tensor, name)
    parts = list(tensor) if isinstance(tensor, list | tuple) else [tensor]
    views = [tensor_view(part, name) for part in parts]
    first = views[0]
    end = first.address
    for view in views:
        dense = view.item_bytes
        axes = zip(view.shape[1:], view.strides[1:], strict=True)
        for size, stride in sorted(axes, key=lambda axis: axis[1]):
            dense = dense * size if stride == dense or size == 1 else -1
        if view.address != end or dense < 0 or view.strides[0] != first.strides[0]:
            raise UsageError(
                f"layer {name!r}: the parts of its state ({shape.head_dim} bytes) are "
                "not contiguous in the block"
            )
        end += dense
    if end - first.address != shape.head_dim:
        raise UsageError(
            f"layer {name!r}: its states have {end - first.address} bytes, but vLLM's "
            f"config gives {shape.head_dim}"
        )
    return dataclasses.replace(
        first,
        shape=(first.shape[0], shape.head_dim),
        strides=(first.strides[0], 1),
        dtype="uint8",
        item_bytes=1,
        owner=views,
    )
