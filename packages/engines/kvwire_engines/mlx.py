"""The caches of mlx_lm, kept in a store or moved; see :mod:`kvwire_engines.caches`.

A server that answers with the stored part of each prompt::

    kept = MlxCaches(store, model, weights=weights_name(folder))
    cache = make_prompt_cache(model)
    known = await kept.get(prompt, cache)
    for token, _ in generate_step(mx.array(prompt[known:]), model, prompt_cache=cache):
        ...
    await kept.put(prompt + answer, cache)

Supported: ``KVCache``, ``QuantizedKVCache`` with any bits and group size, whose KV is
found by caches of the same two numbers, and ``RotatingKVCache``. Once a rotating cache
has dropped its first tokens, it is kept whole, and goes on in a cache of the same size;
before, it is kept in blocks, and filled from any that is not quantised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire_engines.caches import Caches, RowPair, same_shapes
from kvwire_engines.sources import Rows, Shape, raw_dtype
from kvwire_engines.whole import KeptLayer, State, joined
from kvwire_store.conventions import Meaning, Turned, meaning_of

with needed_by("kvwire_engines.mlx", extra="mlx", distribution="kvwire-engines"):
    import mlx.core as mx
    from mlx_lm.models.cache import (
        KVCache,
        QuantizedKVCache,
        RotatingKVCache,
        make_prompt_cache,
    )


class MlxCaches(Caches):
    """Keeps and moves the KV of a model of mlx_lm; caches are lists, as in mlx_lm."""

    engine = "mlx"

    def _meaning(self, model: Any) -> tuple[Meaning, Turned, str]:
        args = model.args
        scaling = getattr(args, "rope_scaling", None)
        meaning = meaning_of(args, scaling, getattr(args, "rope_theta", None))

        def turned(position: int) -> Any:
            rope = model.layers[0].self_attn.rope
            ones = mx.ones((1, 1, 1, self.shape.width))
            return rope(ones, offset=position)[0, 0, 0]

        return meaning, turned, repr(sorted(vars(args).items()))

    def _measure(self, model: Any) -> Shape:
        cache = make_prompt_cache(model)
        model(mx.array([[0]]), cache=cache)
        _check_types(cache)
        found = [
            (one.shape[1], one.shape[3], str(one.dtype))
            for layer in cache
            for one in (layer.keys, layer.values)
        ]
        heads, width, dtype = same_shapes(found, type(model).__name__)
        return Shape(len(cache), heads, width, dtype.removeprefix("mlx.core."))

    def _length(self, cache: Any) -> int:
        _check_types(cache)
        lengths = {layer.offset for layer in cache}
        if len(lengths) != 1:
            raise UsageError(
                f"mlx: the layers of this cache hold {sorted(lengths)} tokens; pass "
                "one that a model has filled"
            )
        for layer in cache:
            _check_one(layer)
        return int(lengths.pop())

    def _lacks_tokens(self, cache: Any) -> bool:
        # The last of a rotating cache's state is the place of the next token.
        return any(
            layer.offset > layer.keys.shape[2] or layer.state[-1] != layer.offset
            for layer in cache
            if isinstance(layer, RotatingKVCache) and not layer.empty()
        )

    def _has_window(self, cache: Any) -> bool:
        return any(isinstance(layer, RotatingKVCache) for layer in cache)

    def _state(self, cache: Any) -> State:
        layers = []
        arrays = []
        for layer in cache:
            if isinstance(layer, QuantizedKVCache):
                raise UsageError(
                    "mlx: a cache with windows and quantised layers is not supported"
                )
            whole = isinstance(layer, RotatingKVCache)
            rows = layer.keys.shape[2] if whole else layer.offset
            numbers = [int(one) for one in layer.state[2:]]
            layers.append(KeptLayer(type(layer).__name__, rows, numbers))
            arrays += [_rows(layer.keys, rows), _rows(layer.values, rows)]
        return State(layers, joined(arrays))

    def _layers(self, cache: Any) -> list[Any]:
        return list(cache)

    def _fits(self, layer: Any, kept: KeptLayer, length: int) -> bool:
        if type(layer).__name__ != kept.kind or kept.numbers[:1] != [length]:
            return False
        if not isinstance(layer, RotatingKVCache):
            return len(kept.numbers) == 1 and kept.rows == length
        if len(kept.numbers) != 4:
            return False
        _, keep, size, place = kept.numbers
        return (keep, size) == (layer.keep, layer.max_size) and 0 <= place <= kept.rows

    def _go_on(self, layer: Any, kept: KeptLayer, rows: RowPair, length: int) -> None:
        keys, values = (self._array(layer, part) for part in rows)
        mx.eval(keys, values)
        layer.state = (keys, values, *kept.numbers)

    def _form(self, cache: Any) -> Shape:
        _check_types(cache)
        if any(not layer.empty() for layer in cache):
            raise UsageError(
                "mlx: the cache is not empty; pass a new one of make_prompt_cache"
            )
        return self._form_of(cache)

    def _form_of(self, cache: Any) -> Shape:
        forms = {_form(layer) for layer in cache}
        if len(forms) != 1:
            raise UsageError(
                "mlx: some layers of this cache are quantised and others not, or in "
                "another way; use one kind for all layers"
            )
        ((bits, group),) = forms
        plain = self.shape
        if not bits:
            return plain
        nbytes = sum(_parts(plain, bits, group))
        return plain._replace(
            width=nbytes, dtype="uint8", form=f"{plain.dtype} q{bits} g{group}"
        )

    def _read(self, cache: Any, tokens: int) -> list[tuple[Any, Any]]:
        return [
            (_rows(layer.keys, tokens), _rows(layer.values, tokens)) for layer in cache
        ]

    def _write(self, cache: Any, rows: list[tuple[Rows, Rows]]) -> None:
        for layer, pair in zip(cache, rows, strict=True):
            keys, values = (self._array(layer, one) for one in pair)
            if isinstance(layer, QuantizedKVCache):
                layer.state = (
                    keys,
                    values,
                    pair[0].shape[1],
                    layer.group_size,
                    layer.bits,
                )
            else:
                layer.update_and_fetch(keys, values)
        # Evaluated now: the rows are memory that the caller may use again.
        mx.eval([layer.state[:2] for layer in cache])

    def _array(self, layer: Any, rows: Rows) -> Any:
        """Return rows as the array, or the arrays, that a layer keeps."""
        bits, group = _form(layer)
        dtype = getattr(mx, self.shape.dtype)
        if not bits:
            return mx.array(rows).view(dtype)[None]
        ends = np.cumsum(_parts(self.shape, bits, group))[:-1]
        packed, *others = (
            mx.array(np.ascontiguousarray(part))[None]
            for part in np.split(rows, ends, axis=-1)
        )
        return (packed.view(mx.uint32), *(one.view(dtype) for one in others))


def _check_types(cache: Any) -> None:
    for layer in cache:
        if type(layer) not in (KVCache, QuantizedKVCache, RotatingKVCache):
            raise UsageError(
                f"mlx: a {type(layer).__name__} is not supported: KVCache, "
                "QuantizedKVCache and RotatingKVCache are"
            )


def _check_one(layer: Any) -> None:
    """Refuse several sequences."""
    if layer.empty():
        return
    keys = layer.keys[0] if isinstance(layer, QuantizedKVCache) else layer.keys
    if keys.shape[0] != 1:
        raise UsageError(
            f"mlx: a cache of {keys.shape[0]} sequences; pass one for each"
        )


def _form(layer: Any) -> tuple[int, int]:
    """Return the bits and group size of a quantised layer; (0, 0) for another."""
    if isinstance(layer, QuantizedKVCache):
        return layer.bits, layer.group_size
    return 0, 0


def _parts(shape: Shape, bits: int, group: int) -> tuple[int, int, int]:
    """Return the bytes of a quantised head of a token: elements, scales, biases."""
    nbytes = shape.width // group * np.dtype(raw_dtype(shape.dtype)).itemsize
    return shape.width * bits // 8, nbytes, nbytes


def _rows(array: Any, tokens: int) -> Rows:
    """View the first tokens of a layer's keys or values; quantised ones are copied."""
    if isinstance(array, tuple | list):
        parts = [_rows(one, tokens) for one in array]
        flat = [np.ascontiguousarray(part).view(np.uint8) for part in parts]
        return np.concatenate(flat, axis=-1)
    seen = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(seen, copy=False)[0, :, :tokens]
