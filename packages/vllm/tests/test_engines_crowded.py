"""Real vLLM engines with more to do than they can: who waits, and who is harmed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvwire_vllm.metadata import answer
from packages.vllm.tests.support.fleets import (
    FETCHED,
    TOKENS,
    Fleet,
    Stream,
    fleet_of,
    own,
)
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.serving import (
    NEEDS_VLLM,
    complete,
    prompt,
    tokens_of,
)
from tests.support.servers import free_port

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(900)]
MISSING = "vllm:kvwire_missing_blocks_sum"
# What all prompts begin with.
SYSTEM = prompt(1024, seed=99)
# Longer than prefill may be silent of a reference that it has made itself.
QUEUE_S = 8.0
LONG = 4000


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One engine of each kind, that fail what they cannot load, as is vLLM's default.

    And whose caches keep prompts.
    """
    folder = tmp_path_factory.mktemp("crowded")
    model = make_model("gqa", folder)
    with fleet_of(model, folder, ("prefill", "decode"), policy="fail") as fleet:
        yield fleet


def test_a_lost_transfer_harms_no_other_request(crowded: Fleet) -> None:
    """A stream of another client uses the same blocks of a system prompt."""
    decode, ids = crowded.decode, [*SYSTEM, *prompt(60, seed=1)]
    want = own(decode, ids, TOKENS)
    nobody = answer(secrets.token_hex(16), (f"127.0.0.1:{free_port()}",))
    failed: list[int] = []

    def lose() -> None:
        lost = [*SYSTEM, *prompt(600, seed=2)]
        with pytest.raises(httpx.HTTPStatusError) as error:
            decode.generate(lost, kv_transfer_params=nobody)
        failed.append(error.value.response.status_code)

    stream = Stream()
    stream.read(decode.url, ids, 5, lose)
    assert failed == [500]
    assert stream.tokens == want


def test_nothing_is_computed_twice_because_prefill_is_slow(crowded: Fleet) -> None:
    """Asked at once, decode waits for as long as prefill has other prompts to do."""
    decode = crowded.decode
    began = time.monotonic()
    crowded.prefill.generate(prompt(LONG, seed=3), 1)
    one_s = time.monotonic() - began
    prompts = [prompt(LONG, seed) for seed in range(10, 12 + int(QUEUE_S / one_s))]
    fetched, missing = decode.metric(FETCHED), decode.metric(MISSING)
    began = time.monotonic()

    def ask(ids: list[int]) -> tuple[list[int], float]:
        answered = tokens_of(complete(crowded.proxy.url, ids))
        return answered, time.monotonic() - began

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    slowest_s = max(took_s for _, took_s in answers)
    fetched, missing = (
        decode.metric(FETCHED) - fetched,
        decode.metric(MISSING) - missing,
    )
    print(f"{len(prompts)} prompts, one in {one_s:.1f} s, all in {slowest_s:.0f} s")
    assert slowest_s > QUEUE_S / 2
    assert (fetched, missing) == (LONG * len(prompts), 0)
    assert [said for said, _ in answers] == [
        own(crowded.decode, ids, 12) for ids in prompts
    ]
