"""Real vLLM engines once more: other models, and every other way to move their KV.

The last of these models have several cache groups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvwire import Config, Engine
from kvwire.security.keys import write_key_file
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
    streamed,
    tokens_of,
)
from tests.support.proxy import Bandwidth, Direction, Proxy
from tests.support.waiting import eventually

PROMPTS = "vllm:prompt_tokens_total"
GUESSED = ("draft_tokens_total", "accepted_tokens_total")
# By name: those of prefill, then those of decode.
ADAPTERS = {"one": 1, "two": 2, "copy": 1, "another": 3}
pytestmark = [NEEDS_VLLM, pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True)
class Way:
    kind: str  # of the model
    # Keys of kv_connector_extra_config.
    transfer: dict[str, Any] = field(default_factory=dict)
    prefill: tuple[int, int] = (1, 1)  # its tensor-parallel ranks and pipeline stages
    decode: tuple[int, int] = (1, 1)  # likewise
    arguments: tuple[str, ...] = ()  # for vLLM
    # vLLM's connector for files is there as well. It breaks with a prompt that is
    # computed in chunks, so none is.
    files: bool = False
    # Each engine speculates with this draft model.
    draft: str = ""
    lengths: tuple[int, ...] = (1, 128, 129, 300, 3000)
    # Decode computes the last token of each prompt itself.
    last: bool = False


# Windows have 256 tokens, blocks 16, chunks of a prompt 1,024.
EDGES = (1, 2, 16, 17, 255, 256, 257, 272, 273, 1025, 3000)


def groups(kind: str, *arguments: str, last: bool = True, **transfer: Any) -> Way:
    """A model of several cache groups."""
    return Way(kind, transfer, arguments=arguments, lengths=EDGES, last=last)


SMALL = ("--block-size", "16")
WIRES = "wires are tried with models of one cache group"
WAYS: dict[str, Way] = {
    "a key head for each query head": Way("mha"),
    "chunk by chunk, sliding windows": Way("window", {"stream": "chunk"}, last=True),
    "two ranks to one": Way("gqa", prefill=(2, 1)),
    "one rank to two": Way("gqa", decode=(2, 1)),
    "two stages to one": Way("gqa", prefill=(1, 2)),
    "one stage to two": Way("gqa", decode=(1, 2)),
    "a child of MultiConnector": Way(
        "gqa", files=True, arguments=("--max-num-batched-tokens", "4352")
    ),
    "a draft model": Way("gqa", draft="gqa"),
    "a draft model of other heads": Way("gqa", draft="draft"),
    "the same, on two ranks to one": Way("gqa", draft="draft", prefill=(2, 1)),
    "short convolutions": groups("conv"),
    # With prefix caching vLLM's kernel for CPUs breaks at the second checkpoint.
    "Mamba": groups("mamba", "--no-enable-prefix-caching"),
    "chunks": groups("chunks", "--block-size", "32"),
    "heads by layer": groups("by layer", "--block-size", "32"),
    "heads by layer, in one table": groups(
        "by layer",
        *("--block-size", "32", "--disable-hybrid-kv-cache-manager"),
        last=False,
    ),
    "windows, with a key": groups("gemma", *SMALL, trust="psk"),
    "windows, no prefix cache, by chunk": groups(
        "gemma", *SMALL, "--no-enable-prefix-caching", stream="chunk"
    ),
}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def pair(way: Way, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model(way.kind, folder)
    transfer = {"lease_s": 3.0, "require": ["tcp"], **way.transfer}
    if way.transfer.get("trust") == "psk":
        transfer["psk_file"] = str(folder / "key")
        write_key_file(folder / "key")
    beside = [files(folder)] if way.files else []
    more = way.arguments
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


def test_tokens_are_those_of_local_generation(pair: Pair, way: Way) -> None:
    for length in way.lengths:
        ids = prompt(length, seed=1)
        hits = pair.fetched
        assert pair.both(ids) == pair.local(ids), length
        assert pair.fetched - hits == length - way.last


def test_the_caches_of_a_draft_model_come_as_well(pair: Pair, way: Way) -> None:
    """It guesses what the model says only if it has the prompt's KV of its own."""
    if way.draft != "gqa":
        pytest.skip("no draft model here guesses anything right, with or without KV")
    before = [pair.decode.metric(f"vllm:spec_decode_num_{n}") for n in GUESSED]
    pair.both(prompt(700, seed=6))
    after = [pair.decode.metric(f"vllm:spec_decode_num_{n}") for n in GUESSED]
    drafted, accepted = (b - a for a, b in zip(before, after, strict=True))
    assert accepted > drafted / 2 > 0


def test_bytes_of_all_layers_move(pair: Pair, way: Way) -> None:
    if way.draft != "draft":
        pytest.skip("all layers of these engines are of one shape")
    name = "vllm:kvwire_received_bytes_sum"
    before = pair.decode.metric(name)
    pair.both(prompt(700, seed=7))
    # Six blocks of 128 tokens in float32: 4 layers of 2 heads of 32, and the draft
    # model's of 4 of 64; keys and values.
    row = 4 * 4 * 2 * (2 * 32 + 4 * 64)
    assert pair.decode.metric(name) - before == 6 * 128 * row


def test_several_at_once(pair: Pair, way: Way) -> None:
    if way.kind == "conv":
        pytest.skip("one engine alone answers otherwise in batches with this model")
    pair.check_alike(range(200, 1201, 200), seed=2)


def test_through_the_proxy(pair: Pair, way: Way, tmp_path: Path) -> None:
    """It names the ranks and stages of each engine to the other one.

    Greedy and sampled, whole and streamed, answers are one engine's. A seed makes vLLM
    die on CPUs if a prompt takes several steps.
    """
    if way.kind == "conv":
        pytest.skip("one engine alone answers otherwise once a pass has one token only")
    key = re.findall(r'"psk_file": "(.*?)"', pair.decode.command[-1])
    signed = ("--psk-file", *key) if key else ()
    proxy = front(tmp_path, *before((pair.prefill, pair.decode)), *signed)
    with running(proxy):
        hits, asked = pair.fetched, 0
        for length in (1, 33, 256, 257, 700):
            ways: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": length}]
            # A guess of a draft model is refused at random.
            for number, how in enumerate(ways[: 1 if way.draft else 2]):
                for seed, asks in ((20, complete), (30, streamed)):
                    ids = prompt(length, seed=seed + number)
                    alone = pair.prefill.generate(ids, cache_salt="alone", **how)
                    said = asks(proxy.url, ids, **how)
                    said = said if asks is streamed else tokens_of(said)
                    assert said == tokens_of(alone)
                    asked += length
        # Decode computes the last token of some prompts, and short prompts whole.
        assert pair.fetched - hits > 0.9 * asked


def test_what_decode_has_of_a_beginning(pair: Pair, way: Way) -> None:
    """The window of the longer prompt lies partly in what decode has."""
    if way.files:
        pytest.skip("vLLM's connector for files breaks with prompts in two parts")
    ids = prompt(1000, seed=13)
    pair.both(ids)
    for longer in (1010, 1100, 1600):
        more = ids + prompt(longer - 1000, seed=14)
        assert pair.both(more) == pair.local(more)


def test_a_prompt_that_is_not_there_is_computed(pair: Pair) -> None:
    """All of it with several groups, of which vLLM takes no block ids."""
    ids = prompt(700, seed=15)
    loads = {"do_remote_prefill": True, "transfer_id": "nobody"}
    loads["remote"] = ["127.0.0.1:9"] * len(pair.prefill.kv.split(","))
    loads["stages"] = pair.prefill.stages
    answer = pair.decode.generate(ids, kv_transfer_params=loads)
    assert tokens_of(answer) == pair.local(ids)
    assert eventually(lambda: pair.decode.idle)


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


def test_over_a_slow_wire(pair: Pair, way: Way) -> None:
    """4 MB/s: prefill is over long before its KV is there."""
    if way.lengths is EDGES:
        pytest.skip(WIRES)
    ids = prompt(1000, seed=3)
    want = pair.local(ids)
    with slow_wires(pair, 4_000_000) as (there, back):
        assert pair.both(ids, there, back) == want
    assert eventually(lambda: pair.idle)


def test_prefill_is_killed_in_the_middle(pair: Pair, way: Way) -> None:
    """Some of the KV is there; decode computes the rest, and lives."""
    if way.lengths is EDGES:
        pytest.skip(WIRES)
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
