"""A request moves whole, or stays and has lost nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest

import kvwire
from kvwire.migration import migrate
from kvwire.migration.messages import MIGRATION_STATE_BYTES_MAX
from tests.migration.engines import BLOCKS, SIZE, Host, Request, engines
from tests.support.caches import LAYERS, SPEC, same
from tests.support.pairs import Pair, connected, until


@pytest.mark.parametrize(
    ("tokens", "grows", "rounds"),
    [
        pytest.param(3 * SIZE, 0, 1, id="whole blocks"),
        pytest.param(3 * SIZE + 1, 0, 2, id="and a part"),
        pytest.param(1, 0, 1, id="less than a block"),
        pytest.param(SIZE, 3, 3, id="it goes on meanwhile"),
    ],
)
async def test_it_moves_with_all_it_has_written(
    tokens: int, grows: int, rounds: int
) -> None:
    request = Request(tokens, grows=grows)
    async with engines() as (pair, host):
        moved = await migrate(pair.left, request)
        assert (moved.result, moved.reason, moved.rounds) == ("moved", "", rounds)
        (arrival,) = host.arrived
    assert (arrival.name, arrival.state) == ("r", b"its tokens")
    assert arrival.tokens == request.tokens
    used = -(-request.tokens // SIZE)
    assert len(arrival.blocks) == used
    whole = request.tokens // SIZE
    assert same(request.memory, BLOCKS[:whole], host.memory, arrival.blocks[:whole])
    for layer in range(LAYERS):
        part = request.tokens % SIZE
        if part:
            there = host.memory.tensors[layer][arrival.blocks[-1]][:, :part]
            here = request.memory.tensors[layer][BLOCKS[whole]][:, :part]
            assert (there == here).all()
    # No block went twice.
    block = request.memory.nbytes // 32
    assert (used - 1) * block < moved.nbytes <= used * block
    assert request.calls == ["pause", "release"]
    assert len(host.free) == 12 - used


def start_fails(pair: Pair, host: Host, request: Request) -> None:
    def fail() -> None:
        raise RuntimeError("no room in the batch")

    host.on_start = fail


def link_is_cut(pair: Pair, host: Host, request: Request) -> None:
    request.on_pause = lambda: pair.right.abort("cut")


def much_to_say(pair: Pair, host: Host, request: Request) -> None:
    request.said = bytes(MIGRATION_STATE_BYTES_MAX + 1)


def text_to_say(pair: Pair, host: Host, request: Request) -> None:
    request.said = cast(Any, "its tokens")


def nothing_is_written(pair: Pair, host: Host, request: Request) -> None:
    request.tokens = request.grows = 0


def tokens_are_taken_back(pair: Pair, host: Host, request: Request) -> None:
    request.on_pause = lambda: setattr(request, "tokens", SIZE)


def it_ends(pair: Pair, host: Host, request: Request) -> None:
    request.on_pause = lambda: setattr(request, "ends_at", 0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(start_fails, "no room in the batch", id="start"),
        pytest.param(link_is_cut, "connection to tcp", id="cut"),
        pytest.param(much_to_say, "its state has", id="state"),
        # The target would ignore these, and the request would be nowhere.
        pytest.param(text_to_say, "Expected `bytes`, got `str`", id="text"),
        pytest.param(nothing_is_written, "0 of its tokens are written", id="nothing"),
        pytest.param(tokens_are_taken_back, f"{SIZE} of its tokens", id="fewer"),
        pytest.param(it_ends, "the request has ended", id="ended"),
    ],
)
async def test_it_stays_and_goes_on(
    fault: Callable[[Pair, Host, Request], None], reason: str
) -> None:
    request = Request(3 * SIZE + 1, grows=1)
    async with engines() as (pair, host):
        fault(pair, host, request)
        stayed = await migrate(pair.left, request)
        assert stayed.result == "stayed"
        assert reason in stayed.reason
        assert request.calls == ["pause", "resume"]
        await until(lambda: len(host.free) == 12)
    assert not host.arrived


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        pytest.param(
            {"free": 2}, "3 more blocks are needed, and fewer are free", id="no blocks"
        ),
        pytest.param(
            {"spec": dataclasses.replace(SPEC, block_tokens=2 * SIZE)},
            f"block_tokens: {SIZE} at the source, {2 * SIZE} here",
            id="block size",
        ),
        pytest.param(
            {"spec": dataclasses.replace(SPEC, kv_heads=1)}, "kv_heads", id="spec"
        ),
    ],
)
async def test_an_engine_that_cannot_take_it_says_why(
    given: dict[str, Any], reason: str
) -> None:
    request = Request(3 * SIZE)
    async with engines(**given) as (pair, host):
        free = len(host.free)
        stayed = await migrate(pair.left, request)
        assert stayed.result == "stayed"
        assert reason in stayed.reason
        assert request.calls == []
        await until(lambda: len(host.free) == free)


async def test_an_engine_that_cannot_resume_it_keeps_no_blocks() -> None:
    """The error is raised once nothing reads the request's blocks any more."""

    def fail() -> None:
        raise RuntimeError("no such request")

    request = Request(3 * SIZE + 1)
    request.resume = fail  # type: ignore[method-assign]
    async with engines() as (pair, host):
        much_to_say(pair, host, request)
        with pytest.raises(RuntimeError, match="no such request"):
            await migrate(pair.left, request)
        await until(lambda: len(host.free) == 12)


async def test_no_answer_leaves_it_to_the_other_engine() -> None:
    """Both may not have it, so this one never goes on."""
    request = Request(3 * SIZE)
    async with engines() as (pair, host):
        host.on_start = lambda: pair.right.abort("cut")
        unknown = await migrate(pair.left, request)
        assert unknown.result == "unknown"
        assert unknown.reason
        assert request.calls == ["pause", "release"]
        assert len(host.arrived) == 1


async def test_an_engine_that_says_nothing_costs_the_timeout() -> None:
    request = Request(SIZE)
    async with connected() as pair:
        stayed = await migrate(pair.left, request, timeout_s=0.05)
    assert stayed.result == "stayed"
    assert stayed.reason == "it took longer than timeout_s=0.05"
    assert request.calls == []


async def test_a_cancelled_migration_leaves_it_here() -> None:
    request = Request(3 * SIZE)
    async with engines() as (pair, host):
        moving = asyncio.create_task(migrate(pair.left, request))
        request.on_pause = moving.cancel
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert request.calls == ["pause", "resume"]
        await until(lambda: len(host.free) == 12)
    assert not host.arrived


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"rounds": 1.5}, "rounds=1.5"),
        ({"rounds": "2"}, "rounds='2'"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": None}, "timeout_s=None"),
    ],
)
async def test_what_is_out_of_range(options: dict[str, Any], said: str) -> None:
    async with connected() as pair:
        with pytest.raises(kvwire.UsageError, match=said):
            await migrate(pair.left, Request(1), **options)


async def test_hybrid_models_are_refused_by_name() -> None:
    request = Request(1)
    tensors = request.memory.tensors
    request.cache = kvwire.PagedCache.grouped(
        {"full": (SPEC, tensors), "window": (SPEC, tensors)}
    )
    async with connected() as pair:
        with pytest.raises(kvwire.UsageError, match="groups full, window"):
            await migrate(pair.left, request)
