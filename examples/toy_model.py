"""A transformer in NumPy with random weights, for examples that run anywhere.

Its text makes no sense, but every token depends on every key and value before it, so
wrong KV leads to other text. Its KV is stored in blocks, as in an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import kvwire

LETTERS = " abcdefghijklmnopqrstuvwxyz,."
SPEC = kvwire.KVSpec(
    layers=6, kv_heads=4, head_dim=16, block_tokens=16, dtype="float32"
)

Floats = npt.NDArray[np.float32]
OnWritten = Callable[[int, int, int], Any]


class Pool:
    """Blocks of KV: one array per layer, and kvwire's view of them."""

    def __init__(self, num_blocks: int = 64) -> None:
        shape = (num_blocks, 2, SPEC.block_tokens, SPEC.kv_heads, SPEC.head_dim)
        self.layers = [np.zeros(shape, np.float32) for _ in range(SPEC.layers)]
        self.cache = kvwire.PagedCache(SPEC, self.layers)


class ToyModel:
    """Six layers of attention over letters; two instances have equal weights."""

    def __init__(self) -> None:
        rng = np.random.default_rng(20)
        width = SPEC.kv_heads * SPEC.head_dim
        scale = 1.5 / np.sqrt(width)
        shape = (SPEC.layers, 4, width, width)
        self._weights = (rng.standard_normal(shape) * scale).astype(np.float32)
        self._letters = rng.standard_normal((len(LETTERS), width)).astype(np.float32)
        self._places = rng.standard_normal((1024, width)).astype(np.float32)
        self._head = rng.standard_normal((width, len(LETTERS))).astype(np.float32)

    def forward(
        self,
        tokens: list[int],
        pool: Pool,
        blocks: list[int],
        start: int = 0,
        on_written: OnWritten | None = None,
    ) -> int:
        """Compute the KV of some tokens into their blocks.

        Args:
            tokens: Letters, by index.
            pool: Has the KV of the preceding tokens, and receives the new KV.
            blocks: The sequence's blocks, in token order.
            start: The position of the first token in the sequence.
            on_written: Called with a layer, the first token and the token after the
                last, as soon as their KV is in the blocks.

        Returns:
            The most likely next token.
        """
        at = np.arange(start, start + len(tokens))
        where = (np.array(blocks)[at // SPEC.block_tokens], at % SPEC.block_tokens)
        x = self._letters[tokens] + self._places[at]
        for layer, (wq, wk, wv, wo) in enumerate(self._weights):
            normal = _normal(x)
            kv = pool.layers[layer]
            kv[where[0], 0, where[1]] = _heads(normal @ wk)
            kv[where[0], 1, where[1]] = _heads(normal @ wv)
            if on_written is not None:
                on_written(layer, start, start + len(tokens))
            x = x + _attention(_heads(normal @ wq), kv[blocks], at) @ wo
        return int(np.argmax(_normal(x[-1:]) @ self._head))

    def decode(
        self, prompt: list[int], pool: Pool, blocks: list[int], new: int
    ) -> list[int]:
        """Generate; the KV of all but the prompt's last token is in the blocks."""
        tokens = prompt[-1:]
        for place in range(len(prompt) - 1, len(prompt) - 1 + new):
            tokens.append(self.forward(tokens[-1:], pool, blocks, place))
        return tokens[1:]

    def answer(
        self, prompt: list[int], pool: Pool, blocks: list[int], new: int, known: int = 0
    ) -> list[int]:
        """Generate; the KV of the prompt's first ``known`` tokens is in the blocks."""
        if known < len(prompt) - 1:
            self.forward(prompt[known:-1], pool, blocks, known)
        return self.decode(prompt, pool, blocks, new)

    def alone(self, prompt: list[int], new: int) -> list[int]:
        """Generate in one process, for comparison."""
        return self.answer(prompt, Pool(), blocks_for(len(prompt) + new), new)


def blocks_for(tokens: int, first: int = 0) -> list[int]:
    """Return enough blocks for these tokens, in reverse order, as any order works."""
    count = -(-tokens // SPEC.block_tokens)
    return list(range(first + count - 1, first - 1, -1))


def tokens_of(text: str) -> list[int]:
    """Convert letters to tokens; any other character becomes a blank."""
    return [max(LETTERS.find(letter), 0) for letter in text.lower()]


def text_of(tokens: list[int]) -> str:
    """Convert tokens to text."""
    return "".join(LETTERS[token] for token in tokens)


def _normal(x: Floats) -> Floats:
    scaled: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    return scaled


def _heads(x: Floats) -> Floats:
    return x.reshape(len(x), SPEC.kv_heads, SPEC.head_dim)


def _attention(q: Floats, kv: Floats, at: npt.NDArray[np.int64]) -> Floats:
    """Return the softmax attention of tokens at ``at`` over all tokens up to each."""
    k, v = np.moveaxis(kv, 1, 0).reshape(2, -1, SPEC.kv_heads, SPEC.head_dim)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(SPEC.head_dim)
    scores = np.where(np.arange(len(k)) > at[:, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Floats = np.einsum("hqk,khd->qhd", weights, v)
    return mixed.reshape(len(q), -1)
