"""Marks of a transfer, derived from the tokens that prefill has written.

Every engine that computes layer by layer needs this step, whatever library it runs on.
"""

from __future__ import annotations

from typing import Protocol

from kvwire.errors import UsageError


class Markable(Protocol):
    """The part of an outgoing transfer that marking needs; asyncio or Engine."""

    def ready(self, *, layers: int, blocks: slice) -> None:
        """Mark block positions of one layer as immutable; from any thread."""

    def finish(self) -> None:
        """Commit, because no more marks follow; from any thread."""


class LayerMarks:
    """Marks blocks of an outgoing transfer as prefill fills them, layer by layer.

    Call it after each layer of each chunk. A chunk may end within a block: the block is
    marked with the chunk that fills it. The last block is marked when the last token is
    written, full or not; from then on the sequence must not grow until the transfer has
    drained, because that would write to a marked block.

    Args:
        out: The transfer that ``comm.publish`` or ``conn.push`` returned.
        num_tokens: Number of tokens that the transfer carries; later ones are not
            marked.
        block_tokens: Tokens per block.
        last_layer: The layer that is computed last. With it the transfer is finished
            together with its last mark, while the rest of the forward pass is still
            being computed; without it the caller calls ``finish``.

    Raises:
        UsageError: ``num_tokens`` or ``block_tokens`` is not positive.
    """

    __slots__ = ("_block_tokens", "_last_layer", "_num_tokens", "_out")

    def __init__(
        self,
        out: Markable,
        num_tokens: int,
        block_tokens: int,
        *,
        last_layer: int | None = None,
    ) -> None:
        if num_tokens < 1 or block_tokens < 1:
            raise UsageError(
                f"LayerMarks: num_tokens={num_tokens}, block_tokens={block_tokens}: "
                "both must be at least 1"
            )
        self._out = out
        self._num_tokens = num_tokens
        self._block_tokens = block_tokens
        self._last_layer = last_layer

    def __call__(self, layer: int, start: int, stop: int) -> None:
        """Mark the tokens in ``range(start, stop)`` of a layer as written."""
        if start >= self._num_tokens:
            return
        size = self._block_tokens
        last = stop >= self._num_tokens
        end = -(-self._num_tokens // size) if last else stop // size
        # If the previous chunk began a block without filling it, that is the first
        # block here.
        first = start // size
        if first < end:
            self._out.ready(layers=layer, blocks=slice(first, end))
        if last and layer == self._last_layer:
            self._out.finish()
