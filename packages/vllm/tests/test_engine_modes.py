"""Real vLLM engines once more: other models, and every other way to move their KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvwire import Config, Engine
from kvwire.types import Address
from packages.vllm.tests.support.models import make_adapter, make_model
from packages.vllm.tests.support.pairs import Pair, pair_of, running
from packages.vllm.tests.support.serving import (
    NEEDS_VLLM,
    before,
    complete,
    engine,
    front,
    prompt,
    tokens_of,
)
from tests.support.proxy import Bandwidth, Direction, Proxy
from tests.support.waiting import eventually

PROMPTS = "vllm:prompt_tokens_total"
GUESSED = ("draft_tokens_total", "accepted_tokens_total")
# By name: those of prefill, then those of decode.
ADAPTERS = {"one": 1, "two": 2, "copy": 1, "another": 3}
pytestmark = [NEEDS_VLLM]


@dataclass(frozen=True, slots=True)
class Way:
    kind: str  # of the model
    # Keys of kv_connector_extra_config.
    transfer: dict[str, Any] = field(default_factory=dict)
    prefill: tuple[int, int] = (1, 1)  # its tensor-parallel ranks and pipeline stages
    decode: tuple[int, int] = (1, 1)  # likewise
    # vLLM's connector for files is there as well. It breaks with a prompt that is
    # computed in chunks, so none is.
    files: bool = False
    # Each engine speculates with this draft model.
    draft: str = ""


WAYS: dict[str, Way] = {
    "a key head for each query head": Way("mha"),
    "chunk by chunk, sliding windows": Way("window", {"stream": "chunk"}),
    "two ranks to one": Way("gqa", prefill=(2, 1)),
    "one rank to two": Way("gqa", decode=(2, 1)),
    "two stages to one": Way("gqa", prefill=(1, 2)),
    "one stage to two": Way("gqa", decode=(1, 2)),
    "a child of MultiConnector": Way("gqa", files=True),
    "a draft model": Way("gqa", draft="gqa"),
    "a draft model of other heads": Way("gqa", draft="draft"),
    "the same, on two ranks to one": Way("gqa", draft="draft", prefill=(2, 1)),
}


@pytest.fixture(scope="module", params=WAYS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm")
    way = WAYS[request.param]
    model = make_model(way.kind, folder)
    transfer = {"lease_s": 3.0, "require": ["tcp"], **way.transfer}
    beside = [files(folder)] if way.files else []
    more: tuple[str, ...] = ()
    if way.files:
        more = ("--max-num-batched-tokens", "4352")
    if way.draft:
        draft = make_model(way.draft, folder)
        said: dict[str, Any] = {"model": str(draft), "method": "draft_model"}
        said |= {"num_speculative_tokens": 2}
        more = ("--speculative-config", json.dumps(said))
    with pair_of(
        *(model, folder, transfer),
        *more,
        prefill=way.prefill,
        decode=way.decode,
        beside=beside,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder; what writes it leaves a thread behind."""
    return make_model("gqa", tmp_path_factory.mktemp("model"))


def test_blocks_of_other_sizes_are_refused_on_cpus(model: Path, tmp_path: Path) -> None:
    """The kernel for CPUs has the token as the last axis of a block's keys."""
    transfer, made = {"require": ["tcp"], "load_timeout_s": 5.0}, []
    for core, (name, size) in enumerate((("prefill", "32"), ("decode", "128"))):
        said = (model, tmp_path, name, core, transfer, "--block-size", size)
        made.append(engine(*said))
    with running(*made):
        pair, ids = Pair(*made), prompt(300, seed=1)
        assert pair.both(ids) == pair.local(ids)
    assert "vllm_blocks" in made[1].log.read_text(errors="replace")


def test_other_weights_under_one_name(model: Path, tmp_path: Path) -> None:
    """A tune with the same config: its engine computes the prompt, and says why."""
    tuned = make_model("gqa", tmp_path, seed=6)
    transfer, made = {"require": ["tcp"], "load_timeout_s": 5.0}, []
    for core, (name, path) in enumerate((("prefill", model), ("decode", tuned))):
        made.append(engine(path, tmp_path, name, core, transfer))
    with running(*made):
        pair, ids = Pair(*made), prompt(300, seed=1)
        local = tokens_of(pair.decode.generate(ids, cache_salt="local"))
        assert local != pair.local(ids)
        assert pair.both(ids) == local
        assert pair.decode.metric("vllm:kvwire_received_bytes_sum") == 0
    assert "vllm_weights" in made[1].log.read_text(errors="replace")


def test_adapters_by_what_is_in_them(model: Path, tmp_path: Path) -> None:
    """Of two names one is the same adapter at another path, and the other is not."""
    paths = [make_adapter(tmp_path / name, seed) for name, seed in ADAPTERS.items()]
    made = []
    for core, (name, listed) in enumerate(
        (("prefill", paths[:2]), ("decode", paths[2:]))
    ):
        modules = [f"{one}={path}" for one, path in zip("ab", listed, strict=True)]
        more = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules)
        transfer = {"require": ["tcp"], "load_timeout_s": 5.0}
        made.append(engine(model, tmp_path, name, core, transfer, *more))
    proxy = front(tmp_path, *before(made))
    with running(*made, proxy):
        pair = Pair(*made)
        ways: tuple[Callable[[list[int], str], list[int]], ...] = (
            lambda ids, name: pair.both(ids, model=name),
            lambda ids, name: tokens_of(complete(proxy.url, ids, model=name)),
        )
        for seed, answer in enumerate(ways, 1):
            ids, moved = prompt(300, seed=seed), []
            for name in "ab":
                was = pair.decode.metric("vllm:kvwire_received_bytes_sum")
                alone = pair.decode.generate(ids, model=name, cache_salt="local")
                assert answer(ids, name) == tokens_of(alone) != pair.local(ids)
                now = pair.decode.metric("vllm:kvwire_received_bytes_sum")
                moved.append(now - was)
            assert moved[0] > moved[1] == 0


def test_encoded_rows(model: Path, tmp_path: Path) -> None:
    """A quarter of the bytes move.

    A model of random weights is never sure of a token, and another one follows from
    there. That most answers begin alike, of 512 words, shows that each row is in place.
    """
    transfer = {"require": ["tcp"], "codec": "int8"}
    prompts = [prompt(200, seed=seed) for seed in range(12)]
    with pair_of(model, tmp_path, transfer) as pair:
        alike = [pair.both(ids)[0] == pair.local(ids)[0] for ids in prompts]
        tokens = sum(map(len, prompts))
        assert pair.fetched == tokens
        moved = pair.decode.metric("vllm:kvwire_received_bytes_sum")
    assert sum(alike) > len(alike) / 2, alike
    # Two blocks of 128 tokens each, in 4 layers, keys and values, 2 heads; a row is 32
    # numbers of 8 bits, and a scale.
    assert moved == len(prompts) * 256 * 4 * 2 * 2 * (32 + 4)


def files(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "files")},
    }


@pytest.mark.parametrize("length", [1, 128, 129, 300, 3000])
def test_tokens_are_those_of_local_generation(pair: Pair, length: int) -> None:
    ids = prompt(length, seed=1)
    hits = pair.fetched
    assert pair.both(ids) == pair.local(ids)
    fetched = pair.fetched - hits
    # With windows the last token is computed at decode, and nowhere else.
    hybrid = "/window" in " ".join(pair.decode.command)
    assert fetched == length - hybrid


def test_the_caches_of_a_draft_model_come_as_well(pair: Pair) -> None:
    """It guesses what the model says only if it has the prompt's KV of its own."""
    if "draft_model" not in " ".join(pair.decode.command):
        pytest.skip("these engines do not speculate")
    if "/draft" in " ".join(pair.decode.command):
        pytest.skip("this draft model guesses nothing right, with its KV or without")
    before = [pair.decode.metric(f"vllm:spec_decode_num_{n}") for n in GUESSED]
    pair.both(prompt(700, seed=6))
    after = [pair.decode.metric(f"vllm:spec_decode_num_{n}") for n in GUESSED]
    drafted, accepted = (b - a for a, b in zip(before, after, strict=True))
    assert accepted > drafted / 2 > 0


def test_bytes_of_all_layers_move(pair: Pair) -> None:
    if "/draft" not in " ".join(pair.decode.command):
        pytest.skip("all layers of these engines are of one shape")
    name = "vllm:kvwire_received_bytes_sum"
    before = pair.decode.metric(name)
    pair.both(prompt(700, seed=7))
    # Six blocks of 128 tokens in float32: 4 layers of 2 heads of 32, and the draft
    # model's of 4 of 64; keys and values.
    row = 4 * 4 * 2 * (2 * 32 + 4 * 64)
    assert pair.decode.metric(name) - before == 6 * 128 * row


def test_several_at_once(pair: Pair) -> None:
    pair.check_alike(range(200, 1201, 200), seed=2)


@contextmanager
def slow_wires(pair: Pair, bytes_per_s: int) -> Iterator[tuple[str, str]]:
    """Where each side's ranks are found behind a slow wire of their own."""
    there, back = pair.prefill.kv.split(","), pair.decode.kv.split(",")
    toxics = [Bandwidth(way, bytes_per_s) for way in Direction]
    wires = AsyncExitStack()

    async def begin() -> list[str]:
        proxies = [Proxy(Address.parse(one), *toxics) for one in (*there, *back)]
        for proxy in proxies:
            await wires.enter_async_context(proxy)
        return [str(proxy.address) for proxy in proxies]

    with Engine(Config()) as loop:
        slow = loop.run(begin())
        try:
            yield ",".join(slow[: len(there)]), ",".join(slow[len(there) :])
        finally:
            loop.run(wires.aclose())


def test_through_the_proxy(pair: Pair, tmp_path: Path) -> None:
    """It names the ranks and stages of each engine to the other one."""
    proxy = front(tmp_path, *before((pair.prefill, pair.decode)))
    with running(proxy):
        for length in (129, 3000):
            ids, hits = prompt(length, seed=5), pair.fetched
            assert tokens_of(complete(proxy.url, ids)) == pair.local(ids)
            assert pair.fetched - hits >= length - 1


def test_over_a_slow_wire(pair: Pair) -> None:
    """4 MB/s: prefill is over long before its KV is there."""
    ids = prompt(1000, seed=3)
    want = pair.local(ids)
    with slow_wires(pair, 4_000_000) as (there, back):
        assert pair.both(ids, there, back) == want
    assert eventually(lambda: pair.idle)


def test_prefill_is_killed_in_the_middle(pair: Pair) -> None:
    """Some of the KV is there; decode computes the rest, and lives."""
    ids = prompt(2000, seed=4)
    want = pair.local(ids)
    computed = pair.prefill.metric(PROMPTS)
    with (
        slow_wires(pair, 200_000) as (there, back),
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(pair.both, ids, there, back)
        assert eventually(lambda: pair.prefill.metric(PROMPTS) > computed)
        assert not answer.done()
        pair.prefill.kill()
        assert answer.result() == want
    assert eventually(lambda: pair.decode.idle)
