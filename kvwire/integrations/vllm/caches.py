"""vLLM's cache tensors as a :class:`kvwire.PagedCache`.

vLLM gives a worker one tensor for each attention layer. Its axes are found from the
sizes that the model and the engine are known to have. Since 0.30 at the latest they are
``(block, head, token, kv dim)`` for every attention backend, keys and values of a token
side by side. What differs are the strides, which a tensor says itself: even the layers
of a block may lie together. Older backends had each an order of its own.

Elements are moved as they are. A cache of fp8 is one of bytes, as vLLM allocates it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvwire.errors import UsageError
from kvwire.kv.layout import AxisOrder
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import DType, KVSpec, dtype_name
from kvwire.kv.tensors import tensor_view


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Describes what a worker's tensors hold, as vLLM's config says.

    Attributes:
        block_tokens: Tokens of a block.
        kv_heads: KV heads of this rank.
        total_kv_heads: Of the model; with MLA 1.
        head_dim: Elements of a head, or of the MLA latent.
        mla: One latent in place of keys and values.
        rank: Of the tensor-parallel group.
        ranks: Its size.
        first_layer: The model's index of this pipeline stage's first layer.
        model_layers: Layers of the whole model that have a cache; None for this stage's
            alone.
        fingerprint: Names the weights.
    """

    block_tokens: int
    kv_heads: int
    total_kv_heads: int
    head_dim: int
    mla: bool = False
    rank: int = 0
    ranks: int = 1
    first_layer: int = 0
    model_layers: int | None = None
    fingerprint: str = ""

    def spec(self, *, layers: int, dtype: DType, rank: int | None = None) -> KVSpec:
        """Return the same as kvwire says it.

        Args:
            layers: Of this stage.
            dtype: Element type.
            rank: Of another rank of the same group; None for this one.

        Raises:
            UsageError: A number is out of range.
        """
        return KVSpec(
            layers=layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=self.block_tokens,
            dtype=dtype,
            components=1 if self.mla else 2,
            shard=(self.rank if rank is None else rank, self.ranks),
            fingerprint=self.fingerprint,
            model_kv_heads=self.total_kv_heads,
            first_layer=self.first_layer,
            model_layers=self.model_layers,
        )


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """Finds the memory of a worker's caches, layer by layer.

    Attributes:
        cache: All of them.
        layers: The model's index of each layer, by vLLM's name of it.
    """

    cache: PagedCache
    layers: Mapping[str, int]


def cache_shape(vllm_config: Any, kv_cache_config: Any) -> CacheShape:
    """Return what vLLM says about its caches.

    Args:
        vllm_config: vLLM's; only read.
        kv_cache_config: Likewise.

    Raises:
        UsageError: The model's layers need several cache groups or another kind of
            cache, or its ranks are split in a way that is not supported.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise UsageError(
            f"this model has {len(groups)} KV cache groups ({kinds}); KvwireConnector "
            "moves one. Models with sliding windows have one with "
            "--disable-hybrid-kv-cache-manager; Mamba layers are not supported"
        )
    spec = groups[0].kv_cache_spec
    for field in ("num_kv_heads", "head_size", "block_size"):
        if not hasattr(spec, field):
            raise UsageError(
                f"KV cache of kind {type(spec).__name__} has no {field}; only "
                "attention over blocks is supported"
            )
    mla = bool(getattr(vllm_config.model_config, "use_mla", False))
    parallel = vllm_config.parallel_config
    for field in ("pipeline", "decode_context", "prefill_context"):
        size = getattr(parallel, f"{field}_parallel_size", 1)
        if size > 1:
            raise UsageError(
                f"{field}_parallel_size={size}: KvwireConnector supports 1 only, since "
                f"the ranks of such a group hold other layers or tokens"
            )
    total = 1 if mla else vllm_config.model_config.get_total_num_kv_heads()
    return CacheShape(
        block_tokens=spec.block_size,
        kv_heads=spec.num_kv_heads,
        total_kv_heads=total,
        head_dim=spec.head_size,
        mla=mla,
        ranks=parallel.tensor_parallel_size,
    )


def layer_caches(tensors: Mapping[str, Any], shape: CacheShape) -> LayerCaches:
    """See a worker's tensors as one cache.

    Args:
        tensors: By vLLM's name of the layer.
        shape: What they hold.

    Raises:
        UsageError: They lie in memory that no transport here can move, or in an order
            that is not known. Names the layer and its shape.
    """
    if not tensors:
        raise UsageError("vLLM registered no KV cache; there is nothing to transfer")
    names = sorted(tensors, key=_layer_index)
    rows: dict[int, int] = {}
    ordered: list[Any] = []
    layers: dict[str, int] = {}
    for name in names:
        tensor = tensors[name]
        _check_plain(name, tensor)
        # A layer that reads another one's cache has no row of its own.
        row = rows.setdefault(tensor_view(tensor, name).address, len(ordered))
        if row == len(ordered):
            ordered.append(tensor)
            layers[name] = shape.first_layer + row
    dtype = dtype_name(ordered[0].dtype)
    spec = shape.spec(layers=len(ordered), dtype=dtype)
    layout = find_layout(tuple(ordered[0].shape), shape)
    return LayerCaches(PagedCache(spec, ordered, layout=AxisOrder(layout)), layers)


def find_layout(sizes: Sequence[int], shape: CacheShape) -> str:
    """Return the axis order of a tensor of these sizes.

    Raises:
        UsageError: None that is known fits.
    """
    extents = {
        "kv": 2,
        "token": shape.block_tokens,
        "head": shape.kv_heads,
        "dim": shape.head_dim,
        "(kv dim)": 2 * shape.head_dim,
    }
    for layout in _MLA_LAYOUTS if shape.mla else _LAYOUTS:
        axes = layout.replace("(kv dim)", "(kv_dim)").split()
        named = [axis.replace("(kv_dim)", "(kv dim)") for axis in axes]
        if len(named) == len(sizes) and all(
            axis == "block" or extents[axis] == size
            for axis, size in zip(named, sizes, strict=True)
        ):
            return layout
    known = ", ".join(f"{axis} {size}" for axis, size in extents.items())
    raise UsageError(
        f"a KV cache tensor of shape {tuple(sizes)} is in no axis order that this "
        f"version knows, with {known}; blocks that the attention backend splits "
        f"(--block-size), quantised caches with scales of their own, and states of "
        f"Mamba layers are not supported"
    )


# The first that fits holds. Where heads and tokens are equally many, two of one length
# fit; which one is taken matters only to a peer whose backend has the other.
_LAYOUTS: Final = (
    "block head token (kv dim)",  # vLLM 0.30 to 0.32
    "block token head (kv dim)",
    # Older: FlashInfer and Triton, and FlashAttention.
    "block kv token head dim",
    "kv block token head dim",
    "block kv head token dim",
    "kv block head token dim",
)
_MLA_LAYOUTS: Final = ("block token dim", "block head token dim")


def _layer_index(name: str) -> tuple[list[int], str]:
    """Sorts ``model.layers.10.self_attn.attn`` behind ``model.layers.9...``."""
    return [int(digits) for digits in re.findall(r"\d+", name)], name


def _check_plain(name: str, tensor: Any) -> None:
    if isinstance(tensor, list | tuple):
        raise UsageError(
            f"layer {name!r} has {len(tensor)} state tensors (Mamba, linear "
            "attention); only attention over blocks is supported"
        )
