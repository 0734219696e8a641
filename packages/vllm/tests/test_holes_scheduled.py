"""Holes before vLLM's own scheduler and block pool, with a model of arithmetic."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test-vllm` installs it",
        allow_module_level=True,
    )

from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.scheduling import BLOCK_TOKENS, next_token, rig
from packages.vllm.tests.support.serving import prompt
from tests.support.waiting import eventually

pytestmark = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("gqa", tmp_path_factory.mktemp("scheduled"))


def after(tokens: list[int], count: int = 3) -> list[int]:
    """What the model says behind a prompt."""
    found = list(tokens)
    for _ in range(count):
        found.append(next_token(found))
    return found[len(tokens) :]


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        ([], 0),
        ([3], 1),
        ([0], 1),
        ([2, 3, 9], 3),
        ([1, 5, 9, 13], 4),
        ([15], 1),  # nothing lies behind it
        ([3, 15], 2),
        ([3, 5, 8], 4),  # block 4 is not worth a request
    ],
    ids=str,
)
def test_tokens_that_are_computed(
    model: Path, ahead: bool, lost: list[int], again: int
) -> None:
    ids = prompt(16 * BLOCK_TOKENS, seed=sum(lost))
    with rig(model, ahead=ahead) as engine:
        engine.fetch("r", ids)
        engine.until(lambda: engine.waiting_for_kv("r"))
        engine.land("r", lost)
        engine.until(lambda: engine.idle)
        assert engine.answers["r"] == after(ids)
        # The last token of a prompt is computed for the first of the answer.
        assert engine.computed - (15 not in lost) == again * BLOCK_TOKENS


def test_two_prompts_with_holes_at_once(model: Path, ahead: bool) -> None:
    """Beside one that runs, and is asked for tokens in each step."""
    first, second = (prompt(12 * BLOCK_TOKENS, seed=seed) for seed in (1, 2))
    other = prompt(200, seed=3)
    with rig(model, ahead=ahead) as engine:
        engine.add("other", other, answer=200)
        engine.fetch("a", first)
        engine.fetch("b", second)
        engine.until(lambda: engine.waiting_for_kv("b"))
        engine.land("a", [2, 7])
        engine.land("b", [0, 1, 6])
        engine.until(lambda: engine.idle)
        assert engine.answers["a"] == after(first)
        assert engine.answers["b"] == after(second)
        assert engine.answers["other"] == after(other, 200)
        assert engine.computed == len(other) + 5 * BLOCK_TOKENS + 2


def test_a_prompt_whose_beginning_is_here(model: Path, ahead: bool) -> None:
    ids = prompt(12 * BLOCK_TOKENS, seed=4)
    with rig(model, ahead=ahead) as engine:
        engine.add("before", ids[: 3 * BLOCK_TOKENS + 5])
        engine.until(lambda: engine.idle)
        before = engine.computed
        engine.fetch("r", ids)
        engine.until(lambda: engine.waiting_for_kv("r"))
        engine.land("r", [5])
        engine.until(lambda: engine.idle)
        assert engine.answers["r"] == after(ids)
        assert engine.computed - before == BLOCK_TOKENS + 1


@pytest.mark.parametrize("when", ["landed", "asked", "computing"])
def test_a_client_goes_away(model: Path, ahead: bool, when: str) -> None:
    """At each step; the request for its hole goes as well, and no block stays held."""
    ids = prompt(16 * BLOCK_TOKENS, seed=5)
    with rig(model, ahead=ahead, chunk=256) as engine:
        engine.fetch("r", ids)
        engine.until(lambda: engine.waiting_for_kv("r"))
        engine.land("r", range(1, 9))
        engine.step()
        if when != "landed":
            engine.until(lambda: bool(engine.own))
        if when == "computing":
            engine.step()  # the second of four
        assert engine.waiting_for_kv("r")
        engine.abort("r")
        asked = [*engine.own.values()]
        assert when == "landed" or eventually(lambda: all(a.gone for a in asked))
        engine.until(lambda: engine.idle)
        assert engine.answers["r"] == []


def test_the_request_for_a_hole_is_aborted(model: Path, ahead: bool) -> None:
    """Everything behind the hole is computed, as without it."""
    ids = prompt(16 * BLOCK_TOKENS, seed=6)
    with rig(model, ahead=ahead, chunk=256) as engine:
        engine.fetch("r", ids)
        engine.until(lambda: engine.waiting_for_kv("r"))
        engine.land("r", range(1, 9))
        engine.until(lambda: bool(engine.own))
        engine.step()
        engine.abort(next(iter(engine.own)))
        engine.until(lambda: not engine.waiting_for_kv("r"))
        engine.hang_up()
        engine.until(lambda: engine.idle)
        assert engine.answers["r"] == after(ids)


@pytest.mark.parametrize("steps", range(6))
def test_the_request_for_a_hole_is_preempted(
    model: Path, ahead: bool, steps: int
) -> None:
    ids = prompt(16 * BLOCK_TOKENS, seed=7)
    with rig(model, ahead=ahead, chunk=256) as engine:
        engine.fetch("r", ids)
        engine.until(lambda: engine.waiting_for_kv("r"))
        engine.land("r", [1, 2, 3, 4, 5, 9])
        engine.until(lambda: bool(engine.own))
        for _ in range(steps):
            engine.step()
        engine.preempt()
        engine.until(lambda: engine.idle)
        assert engine.answers["r"] == after(ids)


def test_no_blocks_are_free_for_it(model: Path, ahead: bool) -> None:
    """The request with the hole holds what it would need; neither waits for ever."""
    ids = prompt(16 * BLOCK_TOKENS, seed=8)
    with rig(model, ahead=ahead, blocks=20, wait_s=1.0) as engine:
        engine.fetch("r", ids)
        engine.until(lambda: engine.waiting_for_kv("r"))
        engine.land("r", [12])
        engine.until(lambda: engine.idle, steps=10**6)
        assert engine.answers["r"] == after(ids)
        # Perhaps the other one comes to its block before it is cancelled.
        assert engine.computed - 4 * BLOCK_TOKENS in (0, BLOCK_TOKENS)


def test_a_server_that_answers_nobody(model: Path, ahead: bool) -> None:
    ids = prompt(8 * BLOCK_TOKENS, seed=9)
    with rig(model, ahead=ahead) as engine:
        engine.close_server()
        engine.fetch("r", ids)
        engine.until(lambda: engine.waiting_for_kv("r"))
        engine.land("r", [2])
        engine.until(lambda: engine.idle, steps=10**6)
        assert engine.answers["r"] == after(ids)
        assert engine.computed == 6 * BLOCK_TOKENS


@pytest.mark.parametrize("key", ["", "guessed", 7, None, ["a"]])
def test_what_clients_write_into_the_key(model: Path, ahead: bool, key: Any) -> None:
    ids = prompt(5 * BLOCK_TOKENS, seed=10)
    with rig(model, ahead=ahead) as engine:
        engine.add("r", ids, kvwire_hole=key)
        engine.until(lambda: engine.idle)
        assert engine.answers["r"] == after(ids)


def test_who_has_the_key_and_another_prompt_gets_nothing(
    model: Path, ahead: bool
) -> None:
    """Its KV is its own."""
    ids = prompt(8 * BLOCK_TOKENS, seed=11)
    other = [ids[0] + 1, *ids[1 : 4 * BLOCK_TOKENS]]
    with rig(model, ahead=ahead) as engine:
        engine.fetch("r", ids)
        engine.until(lambda: engine.waiting_for_kv("r"))
        engine.land("r", [3])
        engine.swap_next = other
        engine.until(lambda: engine.idle, steps=10**6)
        assert engine.answers["r"] == after(ids)
        assert engine.asked == 1


@pytest.mark.parametrize("seed", range(12))
def test_at_random(model: Path, ahead: bool, seed: int) -> None:
    """Prompts with common beginnings, in few blocks, that are aborted and preempted."""
    chance = random.Random(seed)
    beginning = prompt(4 * BLOCK_TOKENS, seed=20)
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    blocks = chance.choice([40, 64])
    with rig(model, ahead=ahead, blocks=blocks, chunk=512, wait_s=1.0) as engine:
        for number in range(10):
            name = f"r{number}"
            shared = chance.randrange(5) * BLOCK_TOKENS
            rest = prompt(chance.randrange(1, 1800), seed=seed * 100 + number)
            prompts[name] = beginning[:shared] + rest
            if chance.random() < 0.8:
                engine.fetch(name, prompts[name])
                places = range(-(-len(prompts[name]) // BLOCK_TOKENS))
                few = chance.random() * 0.5
                engine.land(name, [one for one in places if chance.random() < few])
            else:
                engine.add(name, prompts[name])
            for _ in range(chance.randrange(12)):
                engine.step()
            if chance.random() < 0.2:
                engine.preempt()
            if chance.random() < 0.3:
                gone = chance.choice([*prompts, *engine.own])
                engine.abort(gone)
                aborted.add(gone)
        engine.hang_up()
        engine.until(lambda: engine.idle, steps=10**6)
        for name in prompts.keys() - aborted:
            assert engine.answers[name] == after(prompts[name])
