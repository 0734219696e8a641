"""What one forward pass writes, and what of it has been said.

Saying that a layer is written wakes the thread that sends it, and that runs on the
cores of the forward pass. So small layers are said together, all but the last: the way
of that one is what decode's first token waits for. Layers that are not small keep the
sender busy with their bytes, and gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvwire.integrations.vllm.sending import PromptSend

# Times `group_bytes`: so much of small layers goes in one mark. 300 tokens of 64 KiB in
# 16 layers go in three marks.
_TOGETHER: Final = 4

Recorded = Callable[[], object | None]
"""Gives an event behind the kernels that are queued so far; None without a GPU."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Lists what a forward pass completes of one prompt.

    Attributes:
        departure: Where it goes.
        blocks: By position in the prompt.
        last: Whether the prompt is whole then.
    """

    departure: PromptSend
    blocks: slice
    last: bool


class ForwardPass:
    """Marks what one forward pass writes.

    Args:
        parts: Of prompts; passes that complete no block write nothing.
        layers: That it writes, by the model's indices.
        layer_bytes: Of one layer of one block.
        group_bytes: Of all parts; a layer that has as much is worth a mark by itself.
        recorded: What marks wait for.
    """

    def __init__(
        self,
        parts: Sequence[PromptBlocks] = (),
        layers: range = range(0),
        layer_bytes: int = 0,
        group_bytes: int = 0,
        recorded: Recorded = lambda: None,
    ) -> None:
        self._parts = [part for part in parts if part.blocks.start < part.blocks.stop]
        self._recorded = recorded
        self._unwritten = set(layers) if self._parts else set()
        # Written, and not said.
        self._held = range(0)
        blocks = sum(part.blocks.stop - part.blocks.start for part in self._parts)
        self._group_layers = _group_layers(blocks * layer_bytes, group_bytes)

    def layer(self, layer: int) -> None:
        """Mark a layer that is written, or whose kernels are queued."""
        if layer not in self._unwritten:
            return
        self._hold(layer)
        if len(self._held) >= self._group_layers or len(self._unwritten) <= 1:
            self._say()

    def rest(self) -> None:
        """Mark what was not named: the pass is over."""
        for layer in sorted(self._unwritten):
            self._hold(layer)
        if self._held:
            self._say()

    def _hold(self, layer: int) -> None:
        if self._held and layer != self._held.stop:
            self._say()
        self._unwritten.discard(layer)
        self._held = range(self._held.start if self._held else layer, layer + 1)

    def _say(self) -> None:
        after = self._recorded()
        layers = slice(self._held.start, self._held.stop)
        self._held = range(0)
        for part in self._parts:
            part.departure.ready(layers, part.blocks, after)
            if part.last and not self._unwritten:
                part.departure.finish()


def _group_layers(layer_bytes: int, group_bytes: int) -> int:
    """Return how many layers of a pass go in one mark."""
    if layer_bytes >= group_bytes:
        return 1
    return -(-_TOGETHER * group_bytes // max(1, layer_bytes))
