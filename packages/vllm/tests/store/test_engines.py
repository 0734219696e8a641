"""Real vLLM engines on a store: after a kill, and two that share a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import Pair, running
from packages.vllm.tests.support.serving import (
    ANSWERS_WITHIN_S,
    NEEDS_VLLM,
    Engine,
    engine,
    prompt,
    tokens_of,
)
from packages.vllm.tests.support.store_server import StoreServer
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM]

BLOCK_TOKENS = 128
PROMPTS = (128, 129, 300, 3000)
HITS = "vllm:external_prefix_cache_hits_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    made = StoreServer(tmp_path_factory.mktemp("server"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("gqa", tmp_path_factory.mktemp("model"))


def store(server: StoreServer) -> dict[str, Any]:
    """The connector, on the server."""
    return {
        "kv_connector": "KvwireStoreConnector",
        "kv_connector_module_path": "kvwire_vllm.store.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": ["memory:16MiB", f"kvwire://{server.address}"],
            "lookup_timeout_s": 60.0,
        },
    }


def loaded(one: Engine, ids: list[int], tokens: int = 12) -> tuple[list[int], int]:
    """What an engine makes of a prompt, and how much of it came from elsewhere."""
    before = one.metric(HITS)
    made = tokens_of(one.generate(ids, tokens))
    return made, int(one.metric(HITS) - before)


def test_engines_share_prefixes_that_outlive_them(
    server: StoreServer, model: Path, tmp_path: Path
) -> None:
    """Beside KvwireConnector, which moves others of their prompts."""
    wire = {"lease_s": 3.0, "require": ["tcp"]}
    beside = [store(server)]
    first = engine(model, tmp_path, "first", 0, wire, beside=beside)
    first.environment["VLLM_SERVER_DEV_MODE"] = "1"
    second = engine(model, tmp_path, "second", 1, wire, beside=beside)
    prompts = [prompt(tokens, seed=1) for tokens in PROMPTS]
    usable = [(tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS]
    before = server.blocks()
    with running(first, second):
        cold = [loaded(first, ids) for ids in prompts]
        assert [hits for _, hits in cold] == [0] * len(prompts)
        answers = [made for made, _ in cold]
        kept = sum(tokens // BLOCK_TOKENS for tokens in PROMPTS)
        assert eventually(lambda: server.blocks() - before == kept)
        shared = [loaded(second, ids) for ids in prompts]
        assert shared == list(zip(answers, usable, strict=True))
        moved = Pair(first, second)
        other = prompt(500, seed=11)
        assert moved.both(other) == moved.local(other)
        # All that lies in the memory of the two is lost, and that of the server.
        first.kill()
        server.restart()
        first.start()
        first.wait()
        again = [loaded(first, ids) for ids in prompts]
        assert again == list(zip(answers, usable, strict=True))
        assert eventually(lambda: first.idle and second.idle)
        # Before other weights are loaded, say.
        url = f"{first.url}/reset_prefix_cache?reset_external=true"
        httpx.post(url, timeout=ANSWERS_WITHIN_S).raise_for_status()
        assert [loaded(first, ids) for ids in prompts] == cold


def test_a_draft_model_of_other_heads(
    server: StoreServer, model: Path, tmp_path: Path
) -> None:
    """What one engine has computed of both models, another one loads."""
    draft = make_model("draft", tmp_path)
    said = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
    more = ("--speculative-config", json.dumps(said))
    made = [
        engine(model, tmp_path, name, core, {}, *more, alone=store(server))
        for core, name in enumerate(("first", "second"))
    ]
    ids, before = prompt(1000, seed=31), server.blocks()
    with running(*made):
        cold = loaded(made[0], ids)
        # A block of each of two cache groups.
        kept = 2 * (1000 // BLOCK_TOKENS)
        assert eventually(lambda: server.blocks() - before == kept)
        warm = loaded(made[1], ids)
        assert (cold[1], warm[1]) == (0, 999 // BLOCK_TOKENS * BLOCK_TOKENS)
        assert warm[0] == cold[0]


def test_engines_of_other_weights_share_nothing(
    server: StoreServer, model: Path, tmp_path: Path
) -> None:
    """A tune with the same config, under the same name in the same store."""
    tuned = make_model("gqa", tmp_path, seed=6)
    made = [
        engine(path, tmp_path, path.parent.name, core, {}, alone=store(server))
        for core, path in enumerate((model, tuned))
    ]
    ids = prompt(1000, seed=21)
    with running(*made):
        before = server.blocks()
        answers = [loaded(one, ids) for one in made[:1]]
        assert eventually(lambda: server.blocks() - before == 1000 // BLOCK_TOKENS)
        answers += [loaded(one, ids) for one in made[1:]]
        assert [hits for _, hits in answers] == [0, 0]
        assert answers[0] != answers[1]
        # Without the store of the other, the tune says the same.
        again = tokens_of(made[1].generate(ids, cache_salt="alone"))
        assert answers[1][0] == again
