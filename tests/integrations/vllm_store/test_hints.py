"""KV hints beside requests to a real vLLM engine on a store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvwire.config import Config
from kvwire.store.server.client import ask_report
from tests.support.engines.hints import hints, log_hints, logged
from tests.support.engines.models import make_model
from tests.support.engines.pairs import running
from tests.support.engines.serving import NEEDS_VLLM, engine, prompt, tokens_of
from tests.support.engines.store_server import StoreServer
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM]

BLOCK_TOKENS = 128
BLOCKS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("gqa", tmp_path_factory.mktemp("model"))


def test_an_engine_carries_out_hints(model: Path, tmp_path: Path) -> None:
    server = StoreServer(tmp_path)
    where = f"kvwire://{server.address}"
    store = {
        "kv_connector": "KvwireStoreConnector",
        "kv_connector_module_path": "kvwire.integrations.vllm_store",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": ["memory:16MiB", where]},
    }
    one = engine(model, tmp_path, "one", 0, {}, alone=store)
    log_hints(one, tmp_path)
    ids = prompt(BLOCKS * BLOCK_TOKENS + 1, seed=5)

    def in_memory() -> int:
        return asyncio.run(ask_report(server.address, Config())).tiers[0].stats.blocks

    try:
        with running(one):
            answer = tokens_of(one.generate(ids))
            assert eventually(lambda: server.blocks() == BLOCKS)
            asking = {"action_type": "kv.prefetch", "payload": {"tier": where}}
            assert tokens_of(one.generate(ids, **hints(asking))) == answer
            done = f"<Placement of {BLOCKS} blocks: {BLOCKS} done>"
            assert eventually(lambda: logged(one, f"kv.prefetch a0: {done}"))
            assert in_memory() == BLOCKS
            later = (
                {"action_type": "kv.pin", "payload": {"ttl_s": 60}},
                {"action_type": "kv.retain", "payload": {"priority": 80, "ttl_s": 60}},
                {"action_type": "kv.evict", "payload": {}},
            )
            assert tokens_of(one.generate(ids, **hints(*later))) == answer
            assert eventually(lambda: logged(one, f"kv.pin a0: {done}"))
            assert eventually(lambda: logged(one, f"kv.retain a1: {done}"))
            assert eventually(lambda: logged(one, "refused: kv_hints: actions[2]"))
    finally:
        server.kill()
