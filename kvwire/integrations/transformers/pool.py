"""Torch tensors in blocks, as many as a model has layers, and the cache over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec, dtype_name

with needed_by("kvwire.integrations.transformers", extra="demo"):
    import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def kv_spec(
    config: PretrainedConfig,
    *,
    block_tokens: int,
    dtype: torch.dtype,
    fingerprint: str = "",
) -> KVSpec:
    """Return what the KV cache of a model holds, read from its config.

    Args:
        config: The model's; of a model with several parts, that of its decoder is read.
        block_tokens: Tokens of a block.
        dtype: Element type of keys and values, usually ``model.dtype``.
        fingerprint: Names the weights, such as model and revision; both sides compare
            it, so that KV of another model is refused.

    Raises:
        UsageError: Some layer has no full attention, or a number is out of range.
    """
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if getattr(text, "use_sliding_window", True) and getattr(
        text, "sliding_window", None
    ):
        kinds.add("sliding_attention")
    if kinds != {"full_attention"}:
        others = ", ".join(sorted(kinds - {"full_attention"}))
        raise UsageError(
            f"{type(config).__name__}: layers of {others}; this integration pages full "
            "attention only. Use kvwire.PagedCache.grouped on tensors of your own"
        )
    heads = text.num_attention_heads
    return KVSpec(
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        block_tokens=block_tokens,
        dtype=dtype_name(dtype),
        fingerprint=fingerprint,
    )


class TensorPool:
    """Holds the blocks of one model's sequences: a tensor a layer.

    Args:
        spec: As :func:`kv_spec` gives it.
        num_blocks: Blocks of the pool. It takes ``num_blocks * spec.block_bytes``.

    Attributes:
        spec: What the blocks hold.
        tensors: One of each layer, shape (blocks, 2, block tokens, kv heads, head dim),
            zeroed.
        cache: The same memory for ``publish``, ``pull``, ``push`` and ``expect``.

    Raises:
        UsageError: The spec is one of MLA, which has no separate values.
    """

    __slots__ = ("cache", "spec", "tensors")

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        if spec.components != 2:
            raise UsageError(
                f"TensorPool: components={spec.components}: transformers caches keys "
                "and values, so 2"
            )
        shape = (num_blocks, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)
        dtype = getattr(torch, spec.dtype)
        self.spec: KVSpec = spec
        self.tensors: list[Any] = [
            torch.zeros(shape, dtype=dtype) for _ in range(spec.layers)
        ]
        self.cache: PagedCache = PagedCache(spec, self.tensors, layout="NHD")

    def __repr__(self) -> str:
        return f"TensorPool({self.cache!r})"
