"""A ``transformers`` cache of one sequence, in blocks of a pool.

``transformers`` calls ``update`` once a layer, within that layer's attention: the new
keys and values go in, all of them come out. Here they go into the sequence's blocks and
come out of them again, so there is no second copy that could be right while the blocks
are wrong. The gather costs a copy of the sequence's KV a layer; an engine with a paged
attention kernel reads the blocks in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kvwire.errors import UsageError
from kvwire.extras import needed_by

with needed_by("kvwire.integrations.transformers", extra="demo"):
    import torch
    from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from kvwire.integrations.transformers.pool import TensorPool

OnWritten: TypeAlias = Callable[[int, int, int], None]
"""Called with layer, first token and token behind the last, once they are written."""

BeforeRead: TypeAlias = Callable[[int], None]
"""Called with the layer before its blocks are read; may block until they landed."""


class PagedSequence(Cache):  # type: ignore[misc]  # transformers has no types
    """Keeps the KV of one sequence in blocks; pass it as ``past_key_values``.

    Args:
        pool: Where the blocks are.
        blocks: Ids of this sequence's blocks, in token order; enough for every token it
            will have.
        length: Leading tokens whose KV lies in the blocks already.
        on_written: Called from within the forward pass after each layer's write, so
            before this layer's attention: :class:`LayerMarks`, usually.
        before_read: Called from within the forward pass before each layer's read, with
            the layer; to wait for a layer that is still on its way.

    Raises:
        UsageError: A block id is out of range or there twice, or ``length`` is more
            than the blocks hold.
    """

    def __init__(
        self,
        pool: TensorPool,
        blocks: Sequence[int],
        *,
        length: int = 0,
        on_written: OnWritten | None = None,
        before_read: BeforeRead | None = None,
    ) -> None:
        (ids,) = pool.cache.block_lists(blocks).values()
        capacity = ids.size * pool.spec.block_tokens
        if not 0 <= length <= capacity:
            raise UsageError(
                f"PagedSequence: length={length}, but {ids.size} blocks hold 0 to "
                f"{capacity} tokens"
            )
        self.on_written = on_written
        self.before_read = before_read
        table = torch.from_numpy(ids)
        layers = [
            PagedLayer(self, index, tensor, table, length)
            for index, tensor in enumerate(pool.tensors)
        ]
        super().__init__(layers=layers)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """Keeps one layer of a :class:`PagedSequence`.

    Args:
        sequence: Whose hooks are called.
        index: Which layer.
        tensor: Shape (blocks, 2, block tokens, kv heads, head dim).
        table: The sequence's block ids, in token order.
        length: Leading tokens that are there.
    """

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
        """Write the new tokens' KV into the blocks, and read all of it from there.

        Args:
            key_states: Shape (1, kv heads, new tokens, head dim).
            value_states: The same shape.
            *args: Of other caches; not used.
            **kwargs: The same.

        Returns:
            Keys and values of every token so far, each of shape (1, kv heads, tokens,
            head dim).

        Raises:
            UsageError: More than one sequence, or the blocks are full.
        """
        start = self.length
        stop = start + key_states.shape[-2]
        self._check(key_states, stop)
        at = torch.arange(start, stop)
        size = self._tensor.shape[2]
        blocks, slots = self._table[at // size], at % size
        self._tensor[blocks, 0, slots] = key_states[0].transpose(0, 1)
        self._tensor[blocks, 1, slots] = value_states[0].transpose(0, 1)
        self.length = stop
        if self._sequence.on_written is not None:
            self._sequence.on_written(self._index, start, stop)
        if self._sequence.before_read is not None:
            self._sequence.before_read(self._index)
        return self._read(stop)

    def get_seq_length(self) -> int:
        """Return how many tokens have their KV in the blocks."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the attention mask for so many new tokens."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Return how many tokens the blocks hold."""
        return int(self._table.numel() * self._tensor.shape[2])

    def reset(self) -> None:
        """Forget the tokens; the blocks keep what is in them."""
        self.length = 0

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        """Do nothing: the pool's tensors are there already."""

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
                "sequence, so call the model once for each"
            )
        if stop > self.get_max_length():
            raise UsageError(
                f"PagedSequence: {stop} tokens, but its {self._table.numel()} blocks "
                f"hold {self.get_max_length()}; give it all blocks it will need"
            )
