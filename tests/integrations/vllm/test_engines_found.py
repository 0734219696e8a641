"""Real vLLM engines that a proxy finds in a Redis: answers, draining, a kill."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.integrations.vllm.test_engines_move import TOKENS, Stream
from tests.support.engines import serving
from tests.support.engines.models import make_model
from tests.support.engines.pairs import running
from tests.support.servers import redis_server
from tests.support.waiting import eventually

pytestmark = [serving.NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(900)]
FETCHED = "vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class Found:
    prefill: serving.Engine
    first: serving.Engine
    second: serving.Engine
    proxy: serving.Front

    def is_up(self, *engines: serving.Engine) -> bool:
        """Whether these get requests in the end, and no others."""
        wanted = {one.url for one in engines}
        return eventually(lambda: self.proxy.engines("up") == wanted)

    def fleet(self) -> dict[str, dict[str, Any]]:
        """What the proxy shows of each engine, by its URL."""
        said = httpx.get(f"{self.proxy.url}/fleet").json()
        return {one["url"]: one for one in said["engines"]}

    def right(self, seed: int, alone: serving.Engine) -> None:
        ids = serving.prompt(900, seed)
        want = serving.tokens_of(alone.generate(ids, cache_salt=f"alone {seed}"))
        assert serving.tokens_of(serving.complete(self.proxy.url, ids)) == want


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """All of them, started; nobody has been told an address."""
    folder = tmp_path_factory.mktemp("found")
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        url = f"redis://127.0.0.1:{server.port}"
        model = make_model("gqa", folder)
        shared = {"lease_s": 3.0, "require": ["tcp"], "directory": url}
        roles = ("prefill", "decode", "decode")
        prefill, first, second = engines = [
            serving.engine(
                model, folder, f"{role}-{core}", core, {**shared, "role": role}
            )
            for core, role in enumerate(roles)
        ]
        proxy = serving.front(folder, "--directory", url, "--migrate")
        stack.enter_context(running(*engines, proxy))
        made = Found(prefill, first, second, proxy)
        assert made.is_up(*engines)
        yield made


def test_engines_are_found(found: Found) -> None:
    """What was prefilled elsewhere was fetched, whoever decoded; the proxy says it."""
    for seed in range(6):
        found.right(seed, found.prefill)
    assert found.first.metric(FETCHED) + found.second.metric(FETCHED) == 6 * 900

    engines = found.fleet()
    assert {url: one["role"] for url, one in engines.items()} == {
        found.prefill.url: "prefill",
        found.first.url: "decode",
        found.second.url: "decode",
    }
    assert all(one["state"] == "up" for one in engines.values())
    assert engines[found.prefill.url]["answered"] == 6
    assert sum(one["answered"] for one in engines.values()) == 12
    assert all("tcp" in one["transports"] for one in engines.values())

    # The connections that the transfers were on, said within a second.
    def carrying() -> str:
        return str(found.fleet()[found.prefill.url]["labels"].get("carrying"))

    assert eventually(lambda: carrying().startswith("tcp:"))


def test_an_engine_is_drained_and_ends(found: Found) -> None:
    """Its request goes on at the other one, and its record goes with it."""
    asked = {"engine": found.first.url, "wait_s": 60}

    def drain() -> None:
        said = found.proxy.post("/drain", **asked)
        assert said.json() == {"engine": found.first.url, "running": 0}

    # The other one is drained first, so that the request is at this one.
    found.proxy.post("/drain", engine=found.second.url)
    ids, stream = serving.prompt(900, 9), Stream()

    def back_and_drain() -> None:
        found.proxy.post("/drain", engine=found.second.url, drain=False)
        drain()

    stream.read(found.proxy.url, ids, 12, back_and_drain)
    want = found.prefill.generate(ids, TOKENS, cache_salt="alone 9")
    assert stream.tokens == serving.tokens_of(want)
    print(f"longest pause {stream.pause}")
    before = found.first.metric(FETCHED)
    found.right(10, found.prefill)
    assert found.first.metric(FETCHED) == before
    assert found.first.running is not None
    found.first.running.send_signal(signal.SIGTERM)
    found.first.running.wait(60)
    assert found.is_up(found.prefill, found.second)
    assert eventually(lambda: found.first.url not in found.fleet())
    found.first.kill()


def test_an_engine_is_killed_and_started_again(found: Found) -> None:
    """Meanwhile decode computes prompts itself."""
    found.prefill.kill()
    found.right(11, found.second)
    assert found.is_up(found.second)
    found.prefill.start()
    found.prefill.wait()
    assert found.is_up(found.prefill, found.second)
    before = found.second.metric(FETCHED)
    found.right(12, found.second)
    assert found.second.metric(FETCHED) == before + 900
