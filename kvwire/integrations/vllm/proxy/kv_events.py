"""Routing by cached blocks: ``--route kv-events``.

vLLM publishes over ZeroMQ which blocks its cache adds and removes
(``--kv-events-config``). Here a block is identified by a hash of its tokens and all
tokens before them, independent of the engine's own hash. A forged message can only cost
cache hits.

Missed messages are not requested again: a gap in the numbers of an engine's messages,
or its restart, makes its cache unknown. Blocks with an adapter, a picture or a salt are
ignored, because the prompt's tokens alone do not identify them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from kvwire.aio import end_task, start_task
from kvwire.extras import needed_by
from kvwire.integrations.vllm.proxy.engines import VllmEngine
from kvwire.integrations.vllm.proxy.limits import (
    KV_EVENT_BLOCKS_MAX,
    KV_EVENT_BYTES_MAX,
)
from kvwire.integrations.vllm.proxy.policy import LeastLoaded, Policy
from kvwire.wire.control import DECODE_ERRORS

with needed_by("--route kv-events", extra="kv-events"):
    import zmq
    import zmq.asyncio

logger: logging.Logger = logging.getLogger("kvwire.vllm")

BlockHash: TypeAlias = int | bytes
# To get a cache hit, an engine may have this many requests more than the idlest one.
_BUSIER_MAX: Final = 4
_OF_GPU: Final = (None, "GPU")
# Only this many tokens of a prompt decide its route. With more, each request would cost
# the loop tens of milliseconds.
_TOKENS_MAX: Final = 262_144


class EngineBlocks:
    """Tracks the blocks in an engine's cache, from its events."""

    def __init__(self) -> None:
        # A hash of each block's tokens, by the engine's own hash. bounded:
        # KV_EVENT_BLOCKS_MAX
        self._chains: dict[BlockHash, int] = {}
        self._held: set[int] = set()
        self.block_size: int = 0

    def clear(self) -> None:
        """Forget all blocks."""
        self._chains.clear()
        self._held.clear()

    def take(self, raw: bytes) -> None:
        """Apply a message of events."""
        for event in _BATCH.decode(raw).events:
            if isinstance(event, _Cleared):
                self.clear()
            elif event.medium not in _OF_GPU or event.group_idx:
                continue
            elif isinstance(event, _Stored):
                self._store(event)
            else:
                for name in event.block_hashes:
                    self._held.discard(self._chains.pop(name, 0))

    def matched(self, chains: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt the engine has."""
        for number, chain in enumerate(chains):
            if chain not in self._held:
                return number
        return len(chains)

    def _store(self, event: _Stored) -> None:
        if event.lora_id is not None or event.lora_name or any(event.extra_keys or ()):
            return
        parent = event.parent_block_hash
        before = 0 if parent is None else self._chains.get(parent)
        size = event.block_size
        if before is None or size < 1 or self.block_size not in (0, size):
            return
        self.block_size = size
        chains = chains_of(event.token_ids, size, before)
        for name, chain in zip(event.block_hashes, chains, strict=False):
            if len(self._chains) < KV_EVENT_BLOCKS_MAX:
                self._chains[name] = chain
                self._held.add(chain)  # bounded: KV_EVENT_BLOCKS_MAX


class ByKvEvents(Policy):
    """Prefers the engine that caches most of a prompt, unless it is much busier."""

    def __init__(self) -> None:
        self._idlest = LeastLoaded()
        self._context = zmq.asyncio.Context()
        # bounded: MEMBERS_MAX; engines that are no longer listed are dropped
        self._known: dict[VllmEngine, tuple[EngineBlocks, asyncio.Task[None]]] = {}

    def choose(
        self, engines: Sequence[VllmEngine], body: Mapping[str, Any]
    ) -> VllmEngine:
        """Choose an engine that has most of the prompt and is not much busier."""
        fewest = min(engine.requests for engine in engines)
        tokens = _tokens(body)
        chains = dict[int, list[int]]()
        most = 0
        best = list(engines)
        for engine in engines:
            blocks = self._blocks(engine)
            if blocks is None or engine.requests > fewest + _BUSIER_MAX:
                continue
            size = blocks.block_size
            if size and size not in chains:
                chains[size] = chains_of(tokens, size)
            matched = blocks.matched(chains.get(size, ())) * size
            if matched > most:
                most = matched
                best = []
            if matched == most and most:
                best.append(engine)
        return self._idlest.choose(best, body)

    def holders(
        self, engines: Sequence[VllmEngine], tokens: Sequence[int]
    ) -> Mapping[str, int]:
        """Return by URL the number of leading tokens that each engine caches."""
        found: dict[str, int] = {}
        for engine in engines:
            blocks = self._blocks(engine)
            if blocks is not None and blocks.block_size:
                size = blocks.block_size
                found[engine.url] = blocks.matched(chains_of(tokens, size)) * size
        return found

    async def close(self) -> None:
        """Stop receiving events.

        Cancel safety: call it again.
        """
        for _, task in self._known.values():
            await end_task(task)
        self._known.clear()
        self._context.term()

    def _blocks(self, engine: VllmEngine) -> EngineBlocks | None:
        """Return an engine's known blocks; subscribe if it publishes events."""
        if engine in self._known:
            return self._known[engine][0]
        if not engine.labels.get("kv_events"):
            return None
        for gone in [one for one in self._known if not one.listed]:
            self._known.pop(gone)[1].cancel()
        blocks = EngineBlocks()
        self._known[engine] = blocks, start_task(self._listen(engine, blocks))
        return blocks

    async def _listen(self, engine: VllmEngine, blocks: EngineBlocks) -> None:
        """Apply an engine's messages until cancelled."""
        socket = self._context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, KV_EVENT_BYTES_MAX)
            socket.setsockopt(zmq.IPV6, 1)
            socket.subscribe(b"")
            socket.connect(engine.labels["kv_events"])
            last: bytes | None = None
            while True:
                parts = await socket.recv_multipart()
                try:
                    _, number, raw = parts
                    if last is not None and number != _after(last):
                        blocks.clear()
                    last = number
                    blocks.take(raw)
                except (*DECODE_ERRORS, OverflowError) as exc:
                    blocks.clear()
                    logger.warning("KV events from %s: %r", engine.url, exc)
                # An engine with many messages must not block the loop.
                await asyncio.sleep(0)
        except zmq.ZMQError as exc:
            logger.warning("KV events from %s: %s", engine.url, exc)
        finally:
            socket.close(linger=0)


def chains_of(tokens: Sequence[int], size: int, before: int = 0) -> list[int]:
    """Return for each full block a hash of it and of all blocks before it."""
    chains = []
    for start in range(0, len(tokens) - size + 1, size):
        before = hash((before, tuple(tokens[start : start + size])))
        chains.append(before)
    return chains


def _tokens(body: Mapping[str, Any]) -> Sequence[int]:
    """Return a prompt's tokens; empty for text, which only engines tokenize."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list):
        return ()
    prompt = prompt[:_TOKENS_MAX]
    return prompt if all(type(token) is int for token in prompt) else ()


def _after(number: bytes) -> bytes:
    return (int.from_bytes(number) + 1).to_bytes(8)


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
