"""A process between two engines: it takes KV, and passes on some of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np

import kvwire
from kvwire.kv.layout import AxisOrder
from packages.vllm.tests.support.serving import Engine

BLOCK_TOKENS = 128
# As vLLM's worker has it.
_LAYOUT = AxisOrder("block head token (kv dim)")


class Relay:
    """Keeps the KV of some prompts of one length."""

    def __init__(
        self,
        communicator: kvwire.Communicator,
        address: kvwire.Address,
        *,
        blocks: int,
        prompts: int = 1,
        layers: int = 4,
    ) -> None:
        spec = kvwire.KVSpec(
            layers=layers,
            kv_heads=2,
            head_dim=32,
            block_tokens=BLOCK_TOKENS,
            dtype="float32",
        )
        sizes = (layers, prompts * blocks, 2, BLOCK_TOKENS, 2 * spec.head_dim)
        tensors = list(np.zeros(sizes, np.float32))
        self._communicator = communicator
        self._address = address
        self._cache = kvwire.PagedCache(spec, tensors, _LAYOUT)
        self._blocks = blocks

    def _of(self, prompt: int) -> list[int]:
        return list(range(prompt * self._blocks, (prompt + 1) * self._blocks))

    async def take(self, engine: Engine, name: str, prompt: int = 0) -> None:
        link = await self._communicator.connect(engine.kv)
        tokens = self._blocks * BLOCK_TOKENS
        part = link.pull(name, self._cache, self._of(prompt), tokens=tokens)
        assert (await part).complete

    def offer(
        self, landed: Iterable[int], prompt: int = 0
    ) -> tuple[dict[str, Any], kvwire.Outgoing]:
        """Offer a prompt's KV, but for some blocks."""
        name, tokens = secrets.token_hex(8), self._blocks * BLOCK_TOKENS
        ids = self._of(prompt)
        out = self._communicator.publish(name, self._cache, ids, tokens=tokens)
        for block in landed:
            out.ready(blocks=block)
        out.finish(partial=True)
        remote = [str(self._address)]
        told = {"do_remote_prefill": True, "transfer_id": name, "remote": remote}
        return told, out
