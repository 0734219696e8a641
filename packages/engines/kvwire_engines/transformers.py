"""Hugging Face transformers on a paged KV cache that kvwire can move.

A prefill that streams::

    out = comm.publish(request, pool.cache, blocks, tokens=n)
    marks = LayerMarks(out, n, pool.spec.block_tokens)    # kvwire.kv.marks
    sequence = PagedSequence(pool, blocks, on_written=marks)
    model(input_ids, cache=sequence)     # in a thread; layers flow meanwhile
    out.finish()

and a decode that continues from it::

    outcome = await conn.pull(request, pool.cache, blocks, tokens=n)
    sequence = PagedSequence(pool, blocks, length=outcome.usable_tokens)
    model(rest_of_input_ids, cache=sequence)

Supported: decoder-only models whose layers all have full attention (Llama, Qwen,
Mistral without a window), transformers 5.24 or newer, one sequence per call, host
memory.

``transformers`` calls ``update`` once per layer, within that layer's attention. It
passes the new keys and values, and expects all keys and values back. Here the new ones
are written to the sequence's blocks, and all are gathered from the blocks, so attention
sees exactly what the blocks contain. The gather copies the sequence's KV once per
layer; an engine with a paged attention kernel reads the blocks in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.extras import install_command, needed_by
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec, dtype_name
from kvwire_engines.caches import Caches, RowPair, same_shapes
from kvwire_engines.sources import Shape
from kvwire_engines.whole import KeptLayer, State, joined
from kvwire_store.conventions import Meaning, Turned, meaning_of

with needed_by(
    "kvwire_engines.transformers", extra="transformers", distribution="kvwire-engines"
):
    import torch
    from transformers import PretrainedConfig, __version__
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        StaticLayer,
        StaticSlidingWindowLayer,
    )

# The layers whose keys and values lie in one tensor each, in the order of tokens.
_PLAIN: Final = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
# The layers of a cache that is kept whole.
_WINDOWED: Final = (DynamicLayer, DynamicSlidingWindowLayer)
# Fields of a config that say where it came from.
_OF_THE_FILES: Final = {"_name_or_path", "_commit_hash", "transformers_version"}
# Older ones ignore `cache=`, and a model computes without the KV, silently.
_TRANSFORMERS_MIN: Final = (5, 24)
OnWritten: TypeAlias = Callable[[int, int, int], None]
"""Called with a layer, the first token and the token after the last, once written."""


def check_version(version: str) -> None:
    """Refuse a version of transformers whose models ignore ``cache``.

    Raises:
        BackendUnavailable: It is such a version.
    """
    if tuple(map(int, version.split(".")[:2])) < _TRANSFORMERS_MIN:
        command = install_command("transformers", distribution="kvwire-engines")
        raise BackendUnavailable(
            f"transformers {version} ignores the argument `cache`, so a model would "
            f"compute without it: {command}"
        )


class PagedSequence(Cache):  # type: ignore[misc]  # transformers has no types
    """The KV of one sequence, kept in blocks; pass it to the model as ``cache``.

    Args:
        pool: The pool with the blocks.
        blocks: Ids of this sequence's blocks, in token order; enough for all tokens
            that it will have.
        length: The number of leading tokens whose KV is already in the blocks.
        on_written: Called within the forward pass after each layer's write and before
            this layer's attention; usually a :class:`LayerMarks`.

    Raises:
        UsageError: A block id is out of range or appears twice, or ``length`` is more
            than the blocks hold.
        BackendUnavailable: This version of transformers ignores ``cache``.
    """

    def __init__(
        self,
        pool: TensorPool,
        blocks: Sequence[int],
        *,
        length: int = 0,
        on_written: OnWritten | None = None,
    ) -> None:
        check_version(__version__)
        (ids,) = pool.cache.block_lists(blocks).values()
        capacity = ids.size * pool.spec.block_tokens
        if not 0 <= length <= capacity:
            raise UsageError(
                f"PagedSequence: length={length}, but {ids.size} blocks hold 0 to "
                f"{capacity} tokens"
            )
        self.on_written = on_written
        table = torch.from_numpy(ids)
        layers = [
            _PagedLayer(self, index, tensor, table, length)
            for index, tensor in enumerate(pool.tensors)
        ]
        super().__init__(layers=layers)


def kv_spec(
    config: PretrainedConfig,
    *,
    block_tokens: int,
    dtype: torch.dtype,
    fingerprint: str = "",
) -> KVSpec:
    """Return the spec of a model's KV cache, read from its config.

    Args:
        config: The model's config; for a model with several parts, the decoder's part
            is used.
        block_tokens: Tokens per block.
        dtype: Element type of keys and values, usually ``model.dtype``.
        fingerprint: Names the weights, such as model and revision; both sides compare
            it, so that KV of another model is refused.

    Raises:
        UsageError: A layer does not have full attention, or a number is out of range.
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
    """A pool of blocks for one model's sequences, one tensor per layer.

    Args:
        spec: The spec, from :func:`kv_spec`.
        num_blocks: Blocks in the pool, which takes ``num_blocks * spec.block_bytes``.

    Attributes:
        spec: The spec of the blocks.
        tensors: One per layer, shape (blocks, 2, block tokens, kv heads, head dim),
            zeroed.
        cache: A view of the same memory for ``publish``, ``pull``, ``push`` and
            ``expect``.

    Raises:
        UsageError: The spec is for MLA, which has no separate values.
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


class _PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """Keeps one layer of a :class:`PagedSequence` in a tensor of the pool."""

    is_sliding = False

    def __init__(
        self,
        sequence: PagedSequence,
        index: int,
        tensor: torch.Tensor,
        table: torch.Tensor,
        length: int,
    ) -> None:
        super().__init__()
        self.length: int = length
        self._sequence = sequence
        self._index = index
        self._tensor = tensor
        self._table = table

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens' KV into the blocks; return all KV, read from them.

        All tensors have the shape (1, kv heads, tokens, head dim).
        """
        start = self.length
        stop = start + key_states.shape[-2]
        self._check(key_states, stop)
        at = torch.arange(start, stop)
        size = self._tensor.shape[2]
        blocks = self._table[at // size]
        slots = at % size
        # Detached, since the pool outlives the call and would keep its autograd graph
        # alive.
        self._tensor[blocks, 0, slots] = key_states.detach()[0].transpose(0, 1)
        self._tensor[blocks, 1, slots] = value_states.detach()[0].transpose(0, 1)
        self.length = stop
        if self._sequence.on_written is not None:
            self._sequence.on_written(self._index, start, stop)
        return self._read(stop)

    def get_seq_length(self) -> int:
        """Return the number of tokens whose KV is in the blocks."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the attention mask for new tokens."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Return the number of tokens that fit the blocks."""
        return int(self._table.numel() * self._tensor.shape[2])

    def reset(self) -> None:
        """Set the length to zero; the blocks keep their bytes."""
        self.length = 0

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        """Do nothing: the pool's tensors exist already."""

    def _read(self, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        used = -(-stop // self._tensor.shape[2])
        # (blocks, 2, block tokens, heads, dim) -> (2, heads, tokens, dim)
        both = self._tensor[self._table[:used]].transpose(0, 1)
        both = both.flatten(1, 2)[:, :stop].transpose(1, 2)
        return both[0:1], both[1:2]

    def _check(self, key_states: torch.Tensor, stop: int) -> None:
        if key_states.shape[0] != 1:
            raise UsageError(
                f"PagedSequence: a batch of {key_states.shape[0]}; it holds one "
                "sequence, so call the model once per sequence"
            )
        if stop > self.get_max_length():
            raise UsageError(
                f"PagedSequence: {stop} tokens, but its {self._table.numel()} blocks "
                f"hold {self.get_max_length()}; allocate all the blocks that it will "
                "need"
            )


class TransformersCaches(Caches):
    """Keeps and moves the KV of a model of transformers.

    ``put`` and ``publish`` take a ``DynamicCache`` or ``StaticCache`` of one sequence.
    A ``DynamicCache`` that has dropped tokens before a window is put whole. ``get`` and
    ``pull`` fill any cache that the model can use, quantised ones as a prefill of the
    same tokens would.
    """

    engine = "transformers"

    def _meaning(self, model: Any) -> tuple[Meaning, Turned, str]:
        config = model.config.get_text_config(decoder=True)
        rotation = getattr(config, "rope_parameters", None)
        meaning = meaning_of(config, rotation, getattr(config, "rope_theta", None))

        def turned(position: int) -> Any:
            place = torch.tensor([[position]], device=model.device)
            ones = torch.ones((1, 1, self.shape.width), device=model.device)
            cos, sin = (one[0, 0] for one in model.base_model.rotary_emb(ones, place))
            # As apply_rotary_pos_emb does: the second half comes first, negated.
            sin[: len(sin) // 2] *= -1
            return (cos + sin).float().cpu()

        facts = {
            name: value
            for name, value in config.to_dict().items()
            if name not in _OF_THE_FILES
        }
        return meaning, turned, repr(sorted(facts.items()))

    def _measure(self, model: Any) -> Shape:
        token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        with torch.inference_mode():
            output = model(token, use_cache=True)
        # Its name until transformers 5.23.
        cache = output["cache" if "cache" in output else "past_key_values"]
        for layer in cache.layers:
            _check_plain(layer)
        found = [
            (one.shape[1], one.shape[3], one.dtype)
            for layer in cache.layers
            for one in (layer.keys, layer.values)
        ]
        heads, width, dtype = same_shapes(found, type(model).__name__)
        self._device = model.device
        return Shape(len(cache.layers), heads, width, dtype_name(dtype))

    def _length(self, cache: Any) -> int:
        lengths = {_length(layer) for layer in cache.layers}
        if len(lengths) != 1:
            raise UsageError(
                f"transformers: the layers of this cache hold {sorted(lengths)} "
                "tokens; pass one that a model has filled"
            )
        return lengths.pop()

    def _lacks_tokens(self, cache: Any) -> bool:
        return any(
            int(layer.get_seq_length()) > layer.keys.shape[2]
            for layer in cache.layers
            if layer.is_initialized
        )

    def _has_window(self, cache: Any) -> bool:
        return any(layer.is_sliding for layer in cache.layers)

    def _state(self, cache: Any) -> State:
        layers = []
        arrays = []
        for layer in cache.layers:
            if type(layer) not in _WINDOWED:
                raise UsageError(
                    f"transformers: a {type(layer).__name__} in a cache that has "
                    "dropped tokens before its window is not supported; use a "
                    "DynamicCache"
                )
            rows = layer.keys.shape[2]
            layers.append(KeptLayer(type(layer).__name__, rows, _window(layer)))
            arrays += [_bytes(layer.keys), _bytes(layer.values)]
        return State(layers, joined(arrays))

    def _layers(self, cache: Any) -> list[Any]:
        return list(cache.layers)

    def _fits(self, layer: Any, kept: KeptLayer, length: int) -> bool:
        if type(layer) not in _WINDOWED or type(layer).__name__ != kept.kind:
            return False
        window = _window(layer)
        rows = min([length, *(size - 1 for size in window)])
        return (kept.numbers, kept.rows) == (window, rows)

    def _go_on(self, layer: Any, kept: KeptLayer, rows: RowPair, length: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            layer.update(*self._tensors(rows))
        if layer.is_sliding:
            layer.cumulative_length = length

    def _form(self, cache: Any) -> Shape:
        if int(cache.get_seq_length()):
            raise UsageError("transformers: the cache is not empty; pass a new one")
        return self.shape

    def _form_of(self, cache: Any) -> Shape:
        return self.shape

    def _read(self, cache: Any, tokens: int) -> list[tuple[Any, Any]]:
        return [
            (layer.keys.detach()[0, :, :tokens], layer.values.detach()[0, :, :tokens])
            for layer in cache.layers
        ]

    def _write(self, cache: Any, rows: list[RowPair]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for index, pair in enumerate(rows):
                cache.update(*self._tensors(pair), index)

    def _tensors(self, rows: RowPair) -> list[torch.Tensor]:
        dtype = getattr(torch, self.shape.dtype)
        return [
            torch.from_numpy(one).view(dtype)[None].to(self._device) for one in rows
        ]


def _window(layer: Any) -> list[int]:
    return [layer.sliding_window] if layer.is_sliding else []


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach()[0].cpu().contiguous().view(torch.uint8).numpy()


def _length(layer: Any) -> int:
    """Return the tokens that a layer has seen; refuse several sequences."""
    _check_plain(layer)
    if not layer.is_initialized:
        return 0
    rows = layer.keys.shape[0]
    if rows != 1:
        raise UsageError(
            f"transformers: a cache of {rows} sequences; pass one for each"
        )
    return int(layer.get_seq_length())


def _check_plain(layer: Any) -> None:
    if type(layer) not in _PLAIN:
        raise UsageError(
            f"transformers: a {type(layer).__name__} cannot be read as keys and values "
            f"of tokens: {', '.join(one.__name__ for one in _PLAIN)} can"
        )
