"""Prompts go where their blocks are, as engines say over ZeroMQ in vLLM's format."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvwire.integrations.vllm.announce import BOTH
from kvwire.integrations.vllm.proxy.engines import VllmEngine, VllmServer
from kvwire.integrations.vllm.proxy.policy import (
    BY_KV_EVENTS,
    LEAST_LOADED,
    Policy,
    make_policy,
)
from tests.support.pairs import turns, until

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
from kvwire.integrations.vllm.proxy import kv_events  # noqa: E402

BLOCK = 16


class Cache:
    """An engine's prefix cache of so many blocks, which says what it has."""

    def __init__(self, number: int, context: Any, blocks: int = 400) -> None:
        self._socket = context.socket(zmq.PUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._size, self._number = blocks, 0
        self.looked_for = self.hits = 0
        self.engine = VllmEngine(
            server=VllmServer(f"http://e{number}", ()),
            role=BOTH,
            labels={"kv_events": f"tcp://127.0.0.1:{port}"},
        )

    def serve(self, tokens: list[int]) -> None:
        """Compute what is not there; its name is not that of the proxy."""
        names = [c ^ 7 for c in kv_events.chains_of(tokens, BLOCK)]
        have = next((i for i, n in enumerate(names) if n not in self._blocks), 10**9)
        have = min(have, len(names))
        self.looked_for, self.hits = self.looked_for + len(names), self.hits + have
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        over = max(0, len(self._blocks) - self._size)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(over)]
        parent = names[have - 1] & 2**63 - 1 if have else None
        self.say(
            stored(
                [name & 2**63 - 1 for name in names[have:]],
                tokens[have * BLOCK :],
                parent,
            ),
            {"type": "BlockRemoved", "block_hashes": [n & 2**63 - 1 for n in gone]},
        )

    def say(self, *events: Any, raw: bytes | None = None, skip: int = 0) -> None:
        self._number += 1 + skip
        raw = raw or msgspec.msgpack.encode([1.0, events, 0])
        self._socket.send_multipart([b"", self._number.to_bytes(8), raw])

    def close(self) -> None:
        self._socket.close(linger=0)


def stored(names: list[int], tokens: list[int], parent: int | None = None) -> Any:
    said = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent}
    return said | {"token_ids": tokens, "block_size": BLOCK, "medium": "GPU"}


@pytest.fixture
def caches() -> Iterator[list[Cache]]:
    with zmq.Context() as context:
        made = [Cache(number, context) for number in range(4)]
        yield made
        for cache in made:
            cache.close()


def prompts(number: int) -> Iterator[list[int]]:
    """Chats: each of 60 grows, behind one of 4 system prompts; in any order."""
    chance = random.Random(19)
    chats = [[-1 - i % 4] * 160 + [i] * 160 for i in range(60)]
    for _ in range(number):
        chat = chance.choice(chats)
        chat += [chance.randrange(1000) for _ in range(16)]
        yield list(chat)


async def met(policy: kv_events.ByKvEvents, cache: Cache) -> None:
    """Return when the policy hears a cache; what was said before is lost."""
    known = policy._blocks(cache.engine)
    assert known is not None
    while not known._held:
        cache.say(stored([1], [-9] * BLOCK))
        await turns(200)
    cache.say({"type": "AllBlocksCleared"})
    await until(lambda: not known._held)


async def share(caches: list[Cache], policy: Policy) -> float:
    """The share of blocks that were there, eight requests at once."""
    engines = [cache.engine for cache in caches]
    running: list[VllmEngine] = []
    if isinstance(policy, kv_events.ByKvEvents):
        for cache in caches:
            await met(policy, cache)
    for tokens in prompts(600):
        engine = policy.choose(engines, {"prompt": tokens})
        engine.running += 1
        running.append(engine)
        if len(running) > 8:
            running.pop(0).running -= 1
        cache = caches[engines.index(engine)]
        cache.serve(tokens)
        if isinstance(policy, kv_events.ByKvEvents):
            known, there = policy._known[engine][0], cache._blocks
            await until(lambda: len(known._held) == len(there))  # noqa: B023
    await policy.close()
    return sum(c.hits for c in caches) / sum(c.looked_for for c in caches)


@pytest.mark.parametrize("route", [LEAST_LOADED, BY_KV_EVENTS])
async def test_the_share_of_hits(
    caches: list[Cache], route: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By chance it is 57 %, always the same; by events 91 %."""
    found = await share(caches, make_policy(route))
    with capsys.disabled():
        print(f" {found:.0%} of blocks", end="")
    assert found > (0.8 if route == BY_KV_EVENTS else 0.5)


async def test_what_is_not_believed(caches: list[Cache]) -> None:
    """Gaps and garbage make a cache unknown; a busy engine is passed over."""
    policy, engines = kv_events.ByKvEvents(), [cache.engine for cache in caches]
    prompt, last = [5] * (4 * BLOCK), caches[3]
    ask = {"prompt": [prompt]}

    def hit() -> bool:
        return policy.choose(engines, ask) is last.engine

    def blocks() -> kv_events.EngineBlocks:
        found = policy._blocks(last.engine)
        assert found is not None
        return found

    def known() -> int:
        return blocks().matched(kv_events.chains_of(prompt, BLOCK))

    async def said(condition: Any, *events: Any) -> None:
        while not condition():
            last.say(*events)
            await turns(200)

    four = stored([1, 2, 3, 4], prompt)
    policy.choose(engines, {"prompt": "text"})
    await said(lambda: known() == 4, four)
    assert hit()
    last.engine.running = 5
    assert not hit()
    last.engine.running = 0
    last.say(stored([9], [1] * BLOCK, parent=77))  # of a parent that nobody knows
    last.say(four | {"lora_name": "a"}, four | {"extra_keys": [["salt"]]})
    last.say({"type": "BlockRemoved", "block_hashes": [3, 99]})
    await until(lambda: known() == 2)
    for trouble in ({"skip": 3}, {"raw": b"\xc1"}, {"raw": b"\x93\x01\x02\x03"}):
        await said(lambda: known() == 4, {"type": "AllBlocksCleared"}, four)
        last.say(**trouble)
        await until(lambda: known() == 0)
    await policy.close()
