"""Sends one prompt's KV, layer by layer as the forward pass writes it.

A forward pass must not wait for a peer to be dialled or for an event loop. So calls
that come before the transfer exists are queued, and made as soon as it does.

Marking a layer as written wakes the sending thread, which competes with the forward
pass for CPU cores. So small layers are marked together. The last one is marked alone,
because decode's first token waits for it. Large layers are not grouped: their bytes
keep the sender busy anyway.
"""

from __future__ import annotations

import concurrent.futures
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvwire import Communicator, Engine, Outgoing, PagedCache
from kvwire.errors import UsageError, error_text
from kvwire.kv.spec import KVSpec
from kvwire_vllm.metadata import Blocks, SendPrompt
from kvwire_vllm.peers import PromptEnd
from kvwire_vllm.topology import RankRoute

logger: logging.Logger = logging.getLogger("kvwire.vllm")

# How many times `group_bytes` is marked at once at most. 300 tokens of 64 KiB in 16
# layers are sent in three marks.
_TOGETHER: Final = 4

Recorded = Callable[[], object | None]
"""Returns an event after the kernels queued so far; None without a GPU."""


class PromptSend(PromptEnd[Outgoing]):
    """Sends a prompt's KV to one decode engine."""

    def __init__(
        self,
        engine: Engine,
        send: SendPrompt,
        cache: PagedCache,
        route: RankRoute,
        codec: str = "",
    ) -> None:
        self.tokens: int = send.tokens  # the number of the prompt's tokens to send
        # How many leading blocks of each list the forward pass has completed.
        self.written: dict[str, int] = {}
        self.finished: bool = False  # whether all blocks are completed
        super().__init__(engine, cache, route)
        self._send = send
        self._codec = codec or None
        # Calls that came before the transfer existed.
        self._early: list[Callable[[Outgoing], None]] | None = []
        # Resolves once kvwire no longer touches the blocks, with the number of bytes
        # sent; never fails.
        self.done: concurrent.futures.Future[list[int]] = engine.start(
            self._run(engine.communicator)
        )

    def extend(self, blocks: Blocks) -> None:
        """Add new blocks of the prompt; from any thread, without waiting."""
        if any(blocks.values()):
            self._for_all(Outgoing.extend, blocks)

    def ready(
        self, group: str, layers: slice, blocks: slice, after: object | None
    ) -> None:
        """Mark layers of some blocks as written; from any thread, without waiting."""
        self._for_all(Outgoing.ready, layers, blocks, group=group, after=after)

    def finish(self) -> None:
        """Mark everything as written; from any thread, without waiting."""
        self.finished = True
        self._for_all(Outgoing.finish)

    def renew(self) -> None:
        """Renew the lease while prefill continues."""
        self._engine.start(self._renew())

    # --- on the loop ------------------------------------------------------------------

    async def _run(self, communicator: Communicator) -> list[int]:
        try:
            self._follow(self._send)
            out = self._publish(communicator)
        except Exception as exc:  # noqa: BLE001 - it would end vLLM's engine
            # The decode engine gets no reply, and computes the prompt after its
            # timeout.
            reason = error_text(exc)
            logger.warning("could not start transfer %s: %s", self._route.id, reason)
            return []
        with self._lock:
            early = self._early or []
            self._early = None
            self._parts = [out]
            self._begun = True
            for call in [] if self.reason else early:
                call(out)
        if self.reason:
            # It began only to report the abort, in the same turn, so no block was
            # touched.
            await self._abort()
        outcome = await out
        await out.drained()
        return [outcome.nbytes]

    def _publish(self, communicator: Communicator) -> Outgoing:
        send = self._send
        route = self._route
        options = {**send.options, "growing": True, "codec": self._codec}
        options["consumers"] = len(route.peers)
        return communicator.publish(route.id, self._cache, send.blocks, **options)

    async def _renew(self) -> None:
        for out in self._parts:
            out.renew_lease()

    def _for_all(self, call: Callable[..., None], *what: Any, **more: Any) -> None:
        with self._lock:
            if self._early is not None:
                # bounded by the marks of one prompt
                self._early.append(lambda out: call(out, *what, **more))
                return
            outs = self._parts
        for out in outs:
            try:
                call(out, *what, **more)
            except UsageError:
                # The transfer may have ended meanwhile; the forward pass need not know.
                if not out.done():
                    raise


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt's blocks that a forward pass completes."""

    departure: PromptSend  # the transfer that sends them
    blocks: Mapping[str, range]  # positions in each group's list
    last: bool  # whether they complete the prompt


@dataclass(slots=True)
class _Layers:
    """The layers of one cache group in a forward pass."""

    unwritten: set[int]  # indices in the model
    together: int  # the number of layers per mark
    held: range = range(0)  # written but not marked yet; the next layer may extend it


class ForwardPass:
    """Marks the layers that one forward pass writes.

    Attributes:
        over: Whether everything is marked, or there was nothing to mark.
    """

    def __init__(
        self,
        parts: Sequence[PromptBlocks],
        groups: Mapping[str, KVSpec],
        group_bytes: int = 0,
        recorded: Recorded = lambda: None,
    ) -> None:
        self.over: bool = not parts
        self._parts = parts
        self._recorded = recorded
        self._groups: dict[str, _Layers] = {}
        for name, spec in groups.items():
            blocks = sum(len(part.blocks[name]) for part in parts)
            if blocks:
                together = _group_layers(blocks * spec.layer_block_bytes, group_bytes)
                self._groups[name] = _Layers(set(spec.layer_indices), together)
        self._left = sum(len(group.unwritten) for group in self._groups.values())

    def layer(self, group: str, layer: int) -> None:
        """Mark a layer that has been written or queued on the device."""
        layers = self._groups.get(group)
        if layers is None or layer not in layers.unwritten:
            return
        if layer != layers.held.stop:
            self._mark(group, layers)
            layers.held = range(layer, layer)
        layers.unwritten.remove(layer)
        layers.held = range(layers.held.start, layer + 1)
        self._left -= 1
        if self._left <= 1:
            self._mark_all()
        elif len(layers.held) >= layers.together:
            self._mark(group, layers)

    def rest(self) -> None:
        """Mark all remaining layers, because the pass has ended."""
        # The last layer is marked alone, so it is not among them.
        self._left = sys.maxsize
        for name, layers in self._groups.items():
            layers.together = sys.maxsize
            for layer in sorted(layers.unwritten):
                self.layer(name, layer)
        self._left = 0
        self._mark_all()

    def _mark_all(self) -> None:
        for name, layers in self._groups.items():
            self._mark(name, layers)
        if not self._left and not self.over:
            self.over = True
            for part in self._parts:
                if part.last:
                    part.departure.finish()

    def _mark(self, group: str, layers: _Layers) -> None:
        if not layers.held:
            return
        after = self._recorded()
        held = slice(layers.held.start, layers.held.stop)
        layers.held = range(held.stop, held.stop)
        for part in self._parts:
            blocks = part.blocks[group]
            if blocks:
                which = slice(blocks.start, blocks.stop)
                part.departure.ready(group, held, which, after)


NOTHING_WRITTEN: Final = ForwardPass((), {})


def _group_layers(layer_bytes: int, group_bytes: int) -> int:
    """Return how many of a pass's layers are marked together."""
    if layer_bytes >= group_bytes:
        return 1
    return -(-_TOGETHER * group_bytes // max(1, layer_bytes))
