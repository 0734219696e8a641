"""Verbs at the proxy and hints beside requests, with real vLLM engines on a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.programs.failover.arena import Figures
from tests.support.engines.hints import hints, log_hints, logged
from tests.support.engines.models import make_model
from tests.support.engines.pairs import running
from tests.support.engines.serving import (
    NEEDS_VLLM,
    Engine,
    before,
    engine,
    front,
    metric_of,
    prompt,
    tokens_of,
)
from tests.support.engines.store_server import StoreServer
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_TOKENS = 128
BLOCKS = 6
DONE = f"<Placement of {BLOCKS} blocks: {BLOCKS} done>"


def over(*tiers: str) -> dict[str, Any]:
    return {
        "kv_connector": "KvwireStoreConnector",
        "kv_connector_module_path": "kvwire.integrations.vllm_store",
        "kv_connector_extra_config": {"tiers": ["memory:16MiB", *tiers]},
    }


@contextmanager
def servers(folder: Path, **names: tuple[str, ...]) -> Iterator[list[StoreServer]]:
    made: list[StoreServer] = []
    try:
        for name, more in names.items():
            made.append(StoreServer(folder, "64MiB", "64MiB", *more, name=name))
        yield made
    finally:
        for one in made:
            one.kill()


def has(server: StoreServer, blocks: int) -> bool:
    return server.blocks() == blocks


def source(one: Engine, name: str) -> float:
    """Prompt tokens of an engine from some source."""
    kind = f'source="{name}"'
    return metric_of(one.metrics(), "vllm:prompt_tokens_by_source_total", kind)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("gqa", tmp_path_factory.mktemp("model"))


def test_a_prompt_moves_from_the_store_to_an_engine(
    model: Path, tmp_path: Path
) -> None:
    """It computes the last block of the prompt, and then has all of them."""
    # Sent as text too. The special w0, w1 and w2 split longer words that begin so.
    ids = [300 + one % 200 for one in prompt(BLOCKS * BLOCK_TOKENS + 9, seed=3)]
    asking: list[dict[str, Any]] = [{}, {"cache_salt": "mine"}]
    with servers(tmp_path, kv=()) as (server,):
        store = over(f"kvwire://{server.address}")
        engines = [
            engine(model, tmp_path, f"engine-{core}", core, {}, alone=store)
            for core in (0, 1)
        ]
        decode = before(engines, ["decode"] * 2)
        proxy = front(tmp_path, *decode, "--store", server.http)
        first, second = engines
        with running(*engines, proxy):

            def order(verb: str, **fields: Any) -> dict[str, Any]:
                said = proxy.post(f"/kv/{verb}", model="m", prompt=ids, **fields)
                assert said.status_code == 200, said.text
                told: dict[str, Any] = said.json()
                return told

            for number, more in enumerate(asking):
                answer = tokens_of(first.generate(ids, **more))
                assert eventually(partial(has, server, BLOCKS * (number + 1)))
                assert order("locate", **more)["counts"] == {"done": BLOCKS}
                loaded = source(second, "external_kv_transfer")
                told = order("move", to=second.url, **more)
                assert told["counts"] == {"done": BLOCKS}, told
                loaded = source(second, "external_kv_transfer") - loaded
                assert loaded == BLOCKS * BLOCK_TOKENS
                had = source(second, "local_cache_hit")
                assert tokens_of(second.generate(ids, **more)) == answer
                had = source(second, "local_cache_hit") - had
                assert had == BLOCKS * BLOCK_TOKENS
            # And verbs by a text, which an engine tokenizes.
            words = " ".join(f"w{one}" for one in ids)
            said = proxy.post("/kv/pin", model="m", prompt=words, ttl_s=60).json()
            assert said["counts"] == {"done": BLOCKS}


def test_an_engine_shares_and_demotes(model: Path, tmp_path: Path) -> None:
    """Among two nodes, and out of its own store's memory."""
    directory = f"file:{tmp_path / 'directory'}"
    nodes = {
        name: ("--directory", directory, "--label", f"node={name}") for name in "ab"
    }
    with servers(tmp_path, **nodes) as (a, b):
        store = over(f"kvwire://role=store?directory={directory}")
        one = engine(model, tmp_path, "one", 0, {}, alone=store)
        one.environment["VLLM_SERVER_DEV_MODE"] = "1"
        log_hints(one, tmp_path)
        with running(one):
            ids, kept = (prompt(BLOCKS * BLOCK_TOKENS + 1, seed=at) for at in (5, 6))
            share = {"action_type": "kv.share", "payload": {"to": "b"}}
            answers = [tokens_of(one.generate(ids, **hints(share)))]
            assert eventually(lambda: logged(one, f"kv.share a0: {DONE}")), one.tail()
            assert b.blocks() == BLOCKS
            demote = {"action_type": "kv.demote", "payload": {}}
            assert tokens_of(one.generate(ids, **hints(demote))) == answers[0]
            assert eventually(lambda: logged(one, f"kv.demote a0: {DONE}")), one.tail()
            answers.append(tokens_of(one.generate(kept)))
            # Now nobody has the prompt that was demoted, and the engine the other.
            one.post("/reset_prefix_cache").raise_for_status()
            for server in (a, b):
                server.kill()
            for tokens, answer, count in (
                (ids, answers[0], len(ids)),
                (kept, answers[1], 1),
            ):
                had = Figures.of(one).computed
                assert tokens_of(one.generate(tokens)) == answer
                assert Figures.of(one).computed - had == count
