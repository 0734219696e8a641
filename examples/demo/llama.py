"""What the demo needs of a model, and the files of the one that it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import kvwire
from demo.lines import LayerSpan

CHECKPOINT: Final = Path(__file__).parent / "model"
"""A checkpoint as ``save_pretrained`` of transformers writes it; see its README.md."""

CONTEXT: Final = 512
"""Tokens of a sequence that the model was trained on."""

BLOCK_TOKENS: Final = 16
"""Tokens of a block, the field's usual size."""

OnWritten = Callable[[int, int, int], None]
"""Called with layer, first token and token behind the last, once they are written."""


def blocks_for(tokens: int) -> int:
    """Count how many blocks hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


class Forward(NamedTuple):
    """Holds the most likely next token, and when each layer was computed."""

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
        """Make a sequence whose KV lies in these blocks, of ``length`` tokens already.

        ``on_written`` is called from within the forward pass after each layer's write,
        so before the layer's attention.
        """

    @abstractmethod
    def forward(self, tokens: list[int], sequence: Any) -> Forward:
        """Compute the KV of the tokens behind a sequence, and what would follow."""

    @abstractmethod
    def generate(self, tokens: list[int], new: int) -> list[int]:
        """Return what the model says by itself, with no block and nothing of kvwire."""

    def warm_up(self) -> None:
        """Pay for the first forward pass before anything is timed."""
        self.forward([0] * 20, self.sequence([0, 1]))


def load(library: str, num_blocks: int) -> Llama:
    """Load the model in ``numpy`` or ``torch``, with a pool of so many blocks."""
    if library == "torch":
        from demo.torch_llama import TorchLlama  # noqa: PLC0415 - heavy

        return TorchLlama(num_blocks)
    from demo.numpy_llama import NumpyLlama  # noqa: PLC0415

    return NumpyLlama(num_blocks)


def scattered(num_blocks: int, seed: int) -> list[int]:
    """Return the free blocks of a pool, as they are in an engine after an hour.

    The blocks of a request lie apart, and elsewhere on the other side.
    """
    order: list[int] = np.random.default_rng(seed).permutation(num_blocks).tolist()
    return order
