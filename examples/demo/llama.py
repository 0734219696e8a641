"""The model interface of the demo, and the files of the one checkpoint that it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import kvwire
from demo.lines import LayerSpan

CHECKPOINT: Final = Path(__file__).parent / "model"
"""A checkpoint as transformers' ``save_pretrained`` writes it; see its README.md."""

CONTEXT: Final = 512
"""The length of the sequences that the model was trained on, in tokens."""

BLOCK_TOKENS: Final = 16
"""The number of tokens per block, which is 16 in most engines."""

OnWritten = Callable[[int, int, int], None]
"""Called with a layer, the first and the end of its tokens, once they are written."""


def blocks_for(tokens: int) -> int:
    """Return the number of blocks that these tokens need."""
    return -(-tokens // BLOCK_TOKENS)


class Forward(NamedTuple):
    """The most likely next token, and the time in which each layer was computed."""

    token: int
    spans: list[LayerSpan]


class Llama(ABC):
    """Runs a model on a pool of KV blocks, one sequence at a time."""

    # The pool, as kvwire sees it.
    cache: kvwire.PagedCache

    @abstractmethod
    def sequence(
        self,
        blocks: Sequence[int],
        *,
        length: int = 0,
        on_written: OnWritten | None = None,
    ) -> Any:
        """Return a sequence whose KV is in these blocks, with ``length`` tokens so far.

        The forward pass calls ``on_written`` after each layer's write, before the
        layer's attention.
        """

    @abstractmethod
    def forward(self, tokens: list[int], sequence: Any) -> Forward:
        """Compute the KV of tokens that continue a sequence, and the next token."""

    @abstractmethod
    def generate(self, tokens: list[int], new: int) -> list[int]:
        """Return the tokens that the model generates alone, without blocks."""

    def warm_up(self) -> None:
        """Run one forward pass, so that its start-up cost is not measured later."""
        self.forward([0] * 20, self.sequence([0, 1]))


def load(library: str, num_blocks: int) -> Llama:
    """Load the model in ``numpy`` or ``torch``, with a pool of this many blocks."""
    if library == "torch":
        from demo.torch_llama import TorchLlama  # noqa: PLC0415 - heavy

        return TorchLlama(num_blocks)
    from demo.numpy_llama import NumpyLlama  # noqa: PLC0415

    return NumpyLlama(num_blocks)


def scattered(num_blocks: int, seed: int) -> list[int]:
    """Return the free blocks of a pool in the order they have in a long-running engine.

    A request's blocks are scattered, and differently on the other side.
    """
    order: list[int] = np.random.default_rng(seed).permutation(num_blocks).tolist()
    return order
