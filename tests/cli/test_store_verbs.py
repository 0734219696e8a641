"""``kvwire store locate`` and the other verbs, at a server of this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire import BlockState, BlockStore, StoreServer
from kvwire.cli.main import main
from kvwire.kv.hashing import HashScheme, vllm_block_hashes
from kvwire.store.order import VerbOrder
from kvwire.store.placement import Placing
from tests.support.caches import Filled, chain

A, B = chain(4, "a"), chain(4, "b")
CACHE = Filled(seed=1).cache
HEX = [one.hex() for one in A]

Run = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a verb on a thread: exit status, output, errors."""

    async def running(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(main, ["store", *arguments])
        return status, *capsys.readouterr()

    return running


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[BlockStore, str]]:
    tiers = ["memory:256KiB", f"disk:{tmp_path}?size=1MiB"]
    async with (
        BlockStore.open(tiers) as store,
        StoreServer(store, "127.0.0.1:0") as serving,
    ):
        await store.put(A + B, CACHE, range(8))
        yield store, str(serving.address).split("//")[-1]


async def test_each_verb_is_a_command(server: tuple[BlockStore, str], run: Run) -> None:
    store, where = server
    status, out, _ = await run("demote", where, *HEX)
    assert (status, out.splitlines()[-1]) == (0, "4 done")
    status, out, _ = await run("locate", where, *HEX, "ab" * 32)
    assert status == 1, "one is missing"
    lines = [line.split() for line in out.splitlines()]
    assert lines[1][:2] == ["0-3", "done"]
    assert lines[1][2].startswith("disk:")
    assert lines[2] == ["4", "missing", "it", "is", "not", "in", "the", "store"]
    assert lines[3] == ["4", "done,", "1", "missing"]
    status, out, _ = await run("prefetch", where, *HEX, "--tier", "memory", "--json")
    assert status == 0
    assert json.loads(out)["blocks"] == ["done"] * 4
    assert (await store.locate(A, CACHE)).held["memory:256KiB"].all()
    for verb in (["pin", "--ttl-s", "9"], ["unpin"], ["retain", "--priority", "80"]):
        status, out, _ = await run(verb[0], where, *HEX, *verb[1:])
        assert (status, out.splitlines()[-1]) == (0, "4 done")
    status, out, _ = await run("locate", where, *HEX, "--json")
    assert [name[:4] for name in json.loads(out)["held"]] == ["memo", "disk"]


async def test_blocks_go_to_another_server(
    server: tuple[BlockStore, str], run: Run
) -> None:
    _, where = server
    async with (
        BlockStore.open(["memory:256KiB"]) as there,
        StoreServer(there, "127.0.0.1:0") as other,
    ):
        to = str(other.address).replace("tcp://", "kvwire://")
        to = to if to.startswith("kvwire://") else f"kvwire://{to}"
        status, out, said = await run("move", where, *HEX, "--to", to)
        assert (status, out.splitlines()[-1:]) == (0, ["4 done"]), said
        assert (await there.locate(A, CACHE)).complete
    status, _, said = await run("move", where, *HEX, "--to", "n")
    assert status == 2
    assert "no node with this name" in said


async def test_tokens_name_blocks(
    server: tuple[BlockStore, str], run: Run, tmp_path: Path
) -> None:
    store, where = server
    tokens = list(range(9))
    file = tmp_path / "tokens"
    file.write_text(json.dumps(tokens))
    for scheme, hashes in (
        ("kvwire", HashScheme(4, b"s").block_hashes(tokens)),
        ("vllm", vllm_block_hashes(tokens, 4, seed="s")),
    ):
        await store.put(hashes, CACHE, [0, 1])
        named = ("--tokens", str(file), "--block-tokens", "4", "--scheme", scheme)
        status, out, _ = await run("locate", where, *named, "--seed", "s", "--json")
        assert status == 0
        assert json.loads(out)["prefix"] == 2
    file.write_text("1 2 x")
    status, _, said = await run("locate", where, "--tokens", str(file))
    assert status == 2
    assert "token ids are numbers" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "pass exactly one of them"),
        (["xy"], "hexadecimal digits"),
        (["ab", "--ttl-s", "0"], "ttl_s=0"),
    ],
)
async def test_wrong_arguments_are_named(
    arguments: list[str], said: str, run: Run
) -> None:
    status, _, errors = await run("pin", "127.0.0.1:1", *arguments)
    assert status == 2
    assert said in errors


async def test_a_server_that_is_not_there_is_named(run: Run) -> None:
    status, _, said = await run("locate", "127.0.0.1:1", "ab")
    assert status
    assert "127.0.0.1:1" in said


def test_only_a_move_has_a_place_to_go() -> None:
    with pytest.raises(Exception, match="only move takes to="):
        VerbOrder(hashes=["ab"]).verb("move")
    with pytest.raises(Exception, match="did you mean 'locate'"):
        VerbOrder(hashes=["ab"]).verb("lokate")
    with pytest.raises(Exception, match="retain needs a priority"):
        VerbOrder(hashes=["ab"]).verb("retain")
    placing = Placing(2)
    placing.rule(np.array([0]), BlockState.DONE)
    assert placing.end().prefix == 1
