"""The forward pass of a Llama in NumPy, with keys and values in blocks.

It reads the same checkpoint as transformers and computes the same: RMS norm, rotary
positions, attention with grouped queries, and a gated MLP.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvwire
from demo.lines import LayerSpan
from demo.llama import (
    BLOCK_TOKENS,
    CHECKPOINT,
    Forward,
    Llama,
    OnWritten,
)

Floats = npt.NDArray[np.float32]


class NumpyLlama(Llama):
    """Computes with NumPy alone."""

    def __init__(self, num_blocks: int) -> None:
        self._config = json.loads((CHECKPOINT / "config.json").read_text())
        self._weights = read_safetensors(CHECKPOINT / "model.safetensors")
        self._layers = [
            {
                name.removeprefix(prefix).removesuffix(".weight"): weight
                for name, weight in self._weights.items()
                if name.startswith(prefix)
            }
            for prefix in (
                f"model.layers.{index}."
                for index in range(self._config["num_hidden_layers"])
            )
        ]
        spec = kvwire.KVSpec(
            layers=len(self._layers),
            kv_heads=self._config["num_key_value_heads"],
            head_dim=self._config["head_dim"],
            block_tokens=BLOCK_TOKENS,
            dtype="float32",
            fingerprint="the demo",
        )
        shape = (num_blocks, 2, BLOCK_TOKENS, spec.kv_heads, spec.head_dim)
        self._pool = [np.zeros(shape, np.float32) for _ in self._layers]
        self.cache = kvwire.PagedCache(spec, self._pool, layout="NHD")

    def sequence(
        self,
        blocks: Sequence[int],
        *,
        length: int = 0,
        on_written: OnWritten | None = None,
    ) -> BlockSequence:
        """Return a sequence whose attention reads its blocks."""
        return BlockSequence(self._pool, blocks, length, on_written)

    def forward(self, tokens: list[int], sequence: BlockSequence | Plain) -> Forward:
        """See :class:`Llama`."""
        start = sequence.length
        count = len(tokens)
        at = np.arange(start, start + count)
        angles = self._angles(at)
        x = self._weights["model.embed_tokens.weight"][tokens]
        spans = []
        for index, weights in enumerate(self._layers):
            began = time.monotonic()
            x = x + self._attention(x, index, weights, angles, at, sequence)
            x = x + self._mlp(x, weights)
            spans.append(LayerSpan(index, count, began, time.monotonic()))
        sequence.length += count
        last = self._norm(x[-1:], self._weights["model.norm.weight"])
        scores = last @ self._weights["model.embed_tokens.weight"].T
        return Forward(int(np.argmax(scores)), spans)

    def generate(self, tokens: list[int], new: int) -> list[int]:
        """Generate with KV in growing arrays."""
        sequence = Plain(len(self._layers))
        said = [self.forward(tokens, sequence).token]
        while len(said) < new:
            said.append(self.forward(said[-1:], sequence).token)
        return said

    def _attention(
        self,
        x: Floats,
        index: int,
        weights: dict[str, Floats],
        angles: tuple[Floats, Floats],
        at: npt.NDArray[np.int64],
        sequence: BlockSequence | Plain,
    ) -> Floats:
        normal = self._norm(x, weights["input_layernorm"])
        q, k, v = (
            (normal @ weights[f"self_attn.{name}_proj"].T).reshape(
                len(x), -1, self._config["head_dim"]
            )
            for name in "qkv"
        )
        keys, values = sequence.update(index, _rotated(k, angles), v)
        # Each head of keys and values serves a group of queries: (kv head, group, ...).
        tokens, kv_heads, width = k.shape
        grouped = _rotated(q, angles).reshape(tokens, kv_heads, -1, width)
        grouped /= np.sqrt(np.float32(width))
        scores = grouped.transpose(1, 2, 0, 3) @ keys.transpose(1, 2, 0)[:, None]
        if tokens > 1:
            behind = np.arange(len(keys)) > at[:, None]
            scores += np.where(behind, np.float32(-np.inf), np.float32(0))
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = scores @ values.transpose(1, 0, 2)[:, None]
        joined = mixed.transpose(2, 0, 1, 3).reshape(tokens, -1)
        out: Floats = joined @ weights["self_attn.o_proj"].T
        return out

    def _mlp(self, x: Floats, weights: dict[str, Floats]) -> Floats:
        normal = self._norm(x, weights["post_attention_layernorm"])
        gate = normal @ weights["mlp.gate_proj"].T
        gate /= 1 + np.exp(-gate)
        out: Floats = (gate * (normal @ weights["mlp.up_proj"].T)) @ weights[
            "mlp.down_proj"
        ].T
        return out

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        square = np.mean(x * x, axis=-1, keepdims=True)
        normal: Floats = x / np.sqrt(square + self._config["rms_norm_eps"]) * weight
        return normal.astype(np.float32, copy=False)

    def _angles(self, at: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return the rotary positions' cosine and sine, shape (token, 1, head / 2)."""
        width = self._config["head_dim"]
        parameters = self._config["rope_parameters"]
        frequencies = parameters["rope_theta"] ** -(np.arange(0, width, 2) / width)
        angles = np.outer(at, frequencies)[:, None]
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class BlockSequence:
    """The KV of one sequence in blocks of a pool, which attention reads in place.

    The pool has one array per layer, of shape (block, key or value, token, head,
    element).
    """

    def __init__(
        self,
        pool: list[Floats],
        blocks: Sequence[int],
        length: int,
        on_written: OnWritten | None,
    ) -> None:
        self.length = length
        self._pool = pool
        self._blocks = np.array(blocks)
        self._on_written = on_written

    def update(self, layer: int, keys: Floats, values: Floats) -> tuple[Any, Any]:
        """Write the KV of new tokens into the blocks; return all KV from there."""
        stop = self.length + len(keys)
        at = np.arange(self.length, stop)
        kv = self._pool[layer]
        blocks = self._blocks[at // BLOCK_TOKENS]
        kv[blocks, 0, at % BLOCK_TOKENS] = keys
        kv[blocks, 1, at % BLOCK_TOKENS] = values
        if self._on_written is not None:
            self._on_written(layer, self.length, stop)
        used = kv[self._blocks[: -(-stop // BLOCK_TOKENS)]]
        both = np.moveaxis(used, 1, 0).reshape(2, -1, *keys.shape[1:])
        return both[0, :stop], both[1, :stop]


class Plain:
    """The KV of one sequence in growing arrays, for a single process."""

    def __init__(self, layers: int) -> None:
        self.length = 0
        self.kv: list[tuple[Floats, Floats] | None] = [None] * layers

    def update(self, layer: int, keys: Floats, values: Floats) -> tuple[Any, Any]:
        """Append the KV of new tokens; return all of it."""
        before = self.kv[layer]
        if before is not None:
            keys = np.concatenate((before[0], keys))
            values = np.concatenate((before[1], values))
        self.kv[layer] = keys, values
        return keys, values


def read_safetensors(path: Path) -> dict[str, Floats]:
    """Read the tensors of a checkpoint in bfloat16, as float32.

    The format: 8 bytes with the length of a JSON header, which gives each tensor's
    place in the rest of the file.
    """
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        upper = np.frombuffer(data[start:stop], "<u2").astype("<u4") << 16
        tensors[name] = upper.view(np.float32).reshape(entry["shape"])
    return tensors


def _rotated(x: Floats, angles: tuple[Floats, Floats]) -> Floats:
    cosine, sine = angles
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate(
        (left * cosine - right * sine, right * cosine + left * sine), axis=-1
    )
