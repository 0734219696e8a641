"""Whole states in a store: found by all of their tokens, and never half or hostile."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire_engines.whole import (
    HEAD_BYTES,
    Bytes,
    KeptLayer,
    State,
    WholeStates,
    body_key,
    head_key,
)
from kvwire_store import BlockStore

ROW_BYTES = 8
TOKENS = np.arange(20)
LAYERS = [KeptLayer("A", 5, [20]), KeptLayer("B", 3, [])]
BODY = np.arange(ROW_BYTES * 8, dtype=np.uint8)


def states(store: BlockStore, name: str = "w") -> WholeStates:
    return WholeStates(store, name, ROW_BYTES, "")


async def test_a_state_is_found_by_all_of_its_tokens() -> None:
    async with BlockStore.open(["memory:1MiB"]) as store:
        kept = states(store)
        assert await kept.put(TOKENS, State(LAYERS, BODY))
        assert await kept.put(TOKENS[:7], State(LAYERS[:1], BODY[: ROW_BYTES * 5]))
        assert await kept.longest(np.append(TOKENS, 99)) == 20
        assert await kept.longest(TOKENS[:19]) == 7
        assert await kept.longest(TOKENS[1:]) == 0
        assert await states(store, "others").longest(TOKENS) == 0
        found = await kept.get(TOKENS)
        assert found is not None
        assert found.layers == LAYERS
        assert np.array_equal(found.body, BODY)
        assert await kept.get(TOKENS[:8]) is None


async def test_a_state_survives_a_restart(tmp_path: object) -> None:
    tiers = ["memory:1MiB", f"disk:{tmp_path}/kv?size=1MiB"]
    async with BlockStore.open(tiers) as store:
        assert await states(store).put(TOKENS, State(LAYERS, BODY))
    async with BlockStore.open(tiers) as store:
        found = await states(store).get(TOKENS)
        assert found is not None
        assert np.array_equal(found.body, BODY)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"[]",
        b"no json",
        b'[["A"]]',
        b'[["A", 0, []]]',
        b'[["A", -1, []]]',
        b'[["A", 21, []]]',
        b'[["A", 99999999999, []]]',
        b'[["A", 5, ["x"]]]',
        # It is well formed, and no body of this length is stored.
        b'[["A", 20, []]]',
    ],
)
async def test_a_head_that_describes_no_state(head: bytes) -> None:
    """No size of it is used before it is checked."""
    async with BlockStore.open(["memory:1MiB"]) as store:
        kept = states(store)
        written = np.frombuffer(head.ljust(HEAD_BYTES), np.uint8)
        await kept.write("head", head_key(TOKENS), written)
        await kept.write("body", body_key(TOKENS, written), BODY)
        assert await kept.longest(TOKENS) == 20
        assert await kept.get(TOKENS) is None


async def test_a_head_has_the_body_that_was_stored_with_it() -> None:
    """A ring of the same tokens may begin elsewhere; a kill leaves a body alone."""

    class Killed(WholeStates):
        async def write(self, part: str, key: bytes, memory: Bytes) -> bool:
            return part == "body" and await super().write(part, key, memory)

    async with BlockStore.open(["memory:1MiB"]) as store:
        turned = [KeptLayer("A", 5, [2]), KeptLayer("B", 3, [])]
        killed = Killed(store, "w", ROW_BYTES, "")
        assert not await killed.put(TOKENS, State(turned, BODY[::-1].copy()))
        kept = states(store)
        assert await kept.put(TOKENS, State(LAYERS, BODY))
        found = await kept.get(TOKENS)
        assert found is not None
        assert found.layers == LAYERS
        assert np.array_equal(found.body, BODY)


async def test_what_is_not_stored_whole_is_not_found() -> None:
    """The head is written last, so a body that had no room has none."""
    async with BlockStore.open(["memory:64KiB?slab=16KiB"]) as store:
        kept = states(store)
        large = [KeptLayer("A", 20, [])] * 200
        body = np.zeros(ROW_BYTES * 20 * 200, np.uint8)
        assert not await kept.put(TOKENS, State(large, body))
        assert await kept.longest(TOKENS) == 0
        many = [KeptLayer("A" * 100, 20, [])] * 200
        with pytest.raises(UsageError, match="a whole state of 200 layers"):
            await kept.put(TOKENS, State(many, body))
        assert len(msgspec.json.encode(many)) > HEAD_BYTES
