"""What one forward pass writes, and what of it has been said.

Saying that a layer is written wakes the thread that sends it, and that runs on the
cores of the forward pass. So small layers are said together, all but the last: the way
of that one is what decode's first token waits for. Layers that are not small keep the
sender busy with their bytes, and gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvwire.integrations.vllm.sending import PromptSend
from kvwire.kv.spec import KVSpec

# Times `group_bytes`: so much of small layers goes in one mark. 300 tokens of 64 KiB in
# 16 layers go in three marks.
_TOGETHER: Final = 4

Recorded = Callable[[], object | None]
"""Gives an event behind the kernels that are queued so far; None without a GPU."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Lists what a forward pass completes of one prompt."""

    departure: PromptSend  # where it goes
    blocks: Mapping[str, range]  # by position in each group's list
    last: bool  # whether the prompt is whole then


@dataclass(slots=True)
class _Layers:
    """Tracks one cache group's layers in a pass."""

    unwritten: set[int]  # by the model's indices
    together: int  # how many go in one mark
    held: range = range(0)  # written, and not said


class ForwardPass:
    """Marks what one forward pass writes."""

    def __init__(
        self,
        parts: Sequence[PromptBlocks] = (),
        groups: Mapping[str, KVSpec] = MappingProxyType({}),
        group_bytes: int = 0,
        recorded: Recorded = lambda: None,
    ) -> None:
        self._parts = parts
        self._recorded = recorded
        self._over = not parts
        self._groups: dict[str, _Layers] = {}
        for name, spec in groups.items():
            blocks = sum(len(part.blocks[name]) for part in parts)
            if blocks:
                together = _group_layers(blocks * spec.layer_block_bytes, group_bytes)
                self._groups[name] = _Layers(set(spec.layer_indices), together)
        self._left = sum(len(group.unwritten) for group in self._groups.values())

    def layer(self, group: str, layer: int) -> None:
        """Mark a layer that is written, or whose kernels are queued."""
        layers = self._groups.get(group)
        if layers is None or layer not in layers.unwritten:
            return
        self._hold(group, layers, layer)
        if self._left <= 1:
            self._say_all()
        elif len(layers.held) >= layers.together:
            self._say(group, layers)

    def rest(self) -> None:
        """Mark what was not named: the pass is over."""
        for name, layers in self._groups.items():
            for layer in sorted(layers.unwritten):
                self._hold(name, layers, layer)
        self._say_all()

    def _hold(self, group: str, layers: _Layers, layer: int) -> None:
        if layers.held and layer != layers.held.stop:
            self._say(group, layers)
        layers.unwritten.discard(layer)
        self._left -= 1
        layers.held = range(layers.held.start if layers.held else layer, layer + 1)

    def _say_all(self) -> None:
        for name, layers in self._groups.items():
            if layers.held:
                self._say(name, layers)
        if not self._left and not self._over:
            self._over = True
            for part in self._parts:
                if part.last:
                    part.departure.finish()

    def _say(self, group: str, layers: _Layers) -> None:
        after = self._recorded()
        held, layers.held = slice(layers.held.start, layers.held.stop), range(0)
        for part in self._parts:
            blocks = part.blocks[group]
            if blocks:
                which = slice(blocks.start, blocks.stop)
                part.departure.ready(group, held, which, after)


def _group_layers(layer_bytes: int, group_bytes: int) -> int:
    """Return how many layers of a pass go in one mark."""
    if layer_bytes >= group_bytes:
        return 1
    return -(-_TOGETHER * group_bytes // max(1, layer_bytes))
