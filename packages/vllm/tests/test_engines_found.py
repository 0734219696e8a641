"""Real vLLM engines that a proxy finds in a Redis: answers, draining, a kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from packages.vllm.tests.support.fleets import FETCHED, Fleet, fleet_of
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.serving import NEEDS_VLLM, prompt
from tests.support.servers import redis_server
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two of decode and one of prefill; nobody has been told an address."""
    folder = tmp_path_factory.mktemp("found")
    model = make_model("gqa", folder)
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}"
        roles = ("prefill", "decode", "decode")
        with fleet_of(model, folder, roles, "--migrate", directory=url) as fleet:
            yield fleet


def test_engines_are_found(found: Fleet) -> None:
    """What was prefilled elsewhere was fetched, whoever decoded; the proxy says it."""
    for seed in range(6):
        found.check_answer(prompt(900, seed), found.prefill)
    assert found.fetched == 6 * 900

    engines = found.shown()
    roles = {
        one.url: role for one, role in zip(found.engines, found.roles, strict=True)
    }
    assert {url: one["role"] for url, one in engines.items()} == roles
    assert all(one["state"] == "up" for one in engines.values())
    assert engines[found.prefill.url]["answered"] == 6
    assert sum(one["answered"] for one in engines.values()) == 12
    assert all("tcp" in one["transports"] for one in engines.values())

    # The connections that the transfers were on, said within a second.
    def carrying() -> str:
        return str(found.shown()[found.prefill.url]["labels"].get("carrying"))

    assert eventually(lambda: carrying().startswith("tcp:"))


def test_an_engine_is_drained_and_ends(found: Fleet) -> None:
    """Its request goes on at the other one, and its record goes with it."""
    first, second = found.of("decode")
    # The other one is drained first, so that the request is at this one.
    found.drain(second)

    def back_and_drain() -> None:
        found.proxy.post("/drain", engine=second.url, drain=False)
        found.drain(first)

    stream = found.check_stream(prompt(900, 9), 12, back_and_drain)
    print(f"longest pause {stream.pause}")
    before = first.metric(FETCHED)
    found.check_answer(prompt(900, 10), found.prefill)
    assert first.metric(FETCHED) == before
    found.stop(first)
    assert found.are_up(found.prefill, second)
    assert eventually(lambda: first.url not in found.shown())
    first.kill()


def test_an_engine_is_killed_and_started_again(found: Fleet) -> None:
    """Meanwhile decode computes prompts itself."""
    second = found.engines[2]
    found.prefill.kill()
    found.check_answer(prompt(900, 11), second)
    assert found.are_up(second)
    found.prefill.start()
    found.prefill.wait()
    assert found.are_up(found.prefill, second)
    before = second.metric(FETCHED)
    found.check_answer(prompt(900, 12), second)
    assert second.metric(FETCHED) == before + 900
