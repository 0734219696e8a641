"""A real server of two data-parallel engines, and one that decodes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import Pair, running
from packages.vllm.tests.support.serving import NEEDS_VLLM, engine, prompt, tokens_of
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model("gqa", folder)
    transfer = {"lease_s": 60.0, "require": ["tcp"]}
    twice = ("--data-parallel-size", "2")
    made = [
        engine(model, folder, "prefill", 0, transfer, *twice),
        engine(model, folder, "decode", 1, transfer),
    ]
    made[0].environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    made[0].environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with running(*made):
        yield Pair(*made)


def test_tokens_are_those_of_local_generation(pair: Pair) -> None:
    """Decode finds each prompt with the engine that has computed it."""
    prompts = [prompt(100 * size, seed=1) for size in range(1, 9)]
    sends = {"do_remote_decode": True}
    hits = pair.fetched
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda ids: pair.prefill.generate(ids, 1, kv_transfer_params=sends),
                prompts,
            )
        )
    found = [answer["kv_transfer_params"] for answer in answers]
    assert len({one["remote"][0] for one in found}) == 2
    for ids, where in zip(prompts, found, strict=True):
        answer = pair.decode.generate(ids, kv_transfer_params=where)
        assert tokens_of(answer) == pair.local(ids)
    assert pair.fetched - hits == sum(map(len, prompts))
    assert eventually(lambda: pair.idle)
