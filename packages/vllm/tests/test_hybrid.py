"""Real vLLM engines with models of several cache groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwire.security.keys import write_key_file
from packages.vllm.tests.support import serving
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import Pair, pair_of, running
from tests.support.waiting import eventually

pytestmark = [serving.NEEDS_VLLM, pytest.mark.timeout(900)]
WAYS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "short convolutions": ("conv", {}, ()),
    # With prefix caching vLLM's kernel for CPUs breaks at the second checkpoint.
    "Mamba": ("mamba", {}, ("--no-enable-prefix-caching",)),
    "chunks": ("chunks", {}, ("--block-size", "32")),
    "heads by layer": ("by layer", {}, ("--block-size", "32")),
    "heads by layer, in one table": (
        "by layer",
        {},
        ("--block-size", "32", "--disable-hybrid-kv-cache-manager"),
    ),
    "windows, with a key": ("gemma", {"trust": "psk"}, ("--block-size", "16")),
    "windows, no prefix cache, by chunk": (
        "gemma",
        {"stream": "chunk"},
        ("--block-size", "16", "--no-enable-prefix-caching"),
    ),
}


@pytest.fixture(scope="module", params=WAYS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm")
    kind, more, arguments = WAYS[request.param]
    model = make_model(kind, folder)
    transfer = {"lease_s": 3.0, "require": ["tcp"], **more}
    if more.get("trust") == "psk":
        transfer["psk_file"] = str(folder / "key")
        write_key_file(folder / "key")
    with pair_of(model, folder, transfer, *arguments) as made:
        yield made


@pytest.mark.parametrize("length", [1, 2, 16, 17, 255, 256, 257, 272, 273, 1025, 3000])
def test_tokens_are_those_of_local_generation(pair: Pair, length: int) -> None:
    """Windows have 256 tokens, blocks 16, chunks of a prompt 1,024."""
    ids = serving.prompt(length, seed=1)
    hits = pair.fetched
    assert pair.both(ids) == pair.local(ids)
    one_table = "--disable-hybrid-kv-cache-manager" in pair.decode.command
    assert pair.fetched - hits == length - (not one_table)


def test_answers_through_the_proxy(pair: Pair, tmp_path: Path) -> None:
    """Greedy and sampled, whole and streamed, they are one engine's.

    A seed makes vLLM die on CPUs if a prompt takes several steps.
    """
    if "/conv" in " ".join(pair.decode.command):
        pytest.skip("one engine alone answers otherwise once a pass has one token only")
    config = pair.decode.command[-1]
    key = re.findall(r'"psk_file": "(.*?)"', config)
    signed = ("--psk-file", *key) if key else ()
    proxy = serving.front(
        tmp_path, *serving.before((pair.prefill, pair.decode)), *signed
    )
    with running(proxy):
        hits, asked = pair.fetched, 0
        for length in (1, 33, 256, 257, 700):
            ways: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": length}]
            for number, how in enumerate(ways):
                ids = serving.prompt(length, seed=20 + number)
                alone = pair.prefill.generate(ids, cache_salt="alone", **how)
                whole = serving.complete(proxy.url, ids, **how)
                assert serving.tokens_of(whole) == serving.tokens_of(alone)
                ids = serving.prompt(length, seed=30 + number)
                alone = pair.prefill.generate(ids, cache_salt="alone", **how)
                pieces = serving.streamed(proxy.url, ids, **how)
                assert pieces == serving.tokens_of(alone)
                asked += 2 * length
        # Decode computes the last token of each prompt, and short prompts whole.
        assert pair.fetched - hits > 0.9 * asked


def test_several_at_once(pair: Pair) -> None:
    if "/conv" in " ".join(pair.decode.command):
        pytest.skip("one engine alone answers otherwise in batches with this model")
    pair.check_alike(range(200, 1201, 200), seed=2)


def test_what_decode_has_of_a_beginning(pair: Pair) -> None:
    """The window of the longer prompt lies partly in what decode has."""
    ids = serving.prompt(1000, seed=3)
    pair.both(ids)
    for longer in (1010, 1100, 1600):
        more = ids + serving.prompt(longer - 1000, seed=4)
        assert pair.both(more) == pair.local(more)


def test_a_prompt_that_is_not_there_is_computed(pair: Pair) -> None:
    """All of a request, since vLLM takes no block ids of several groups."""
    ids = serving.prompt(700, seed=5)
    loads = {
        "do_remote_prefill": True,
        "transfer_id": "nobody",
        "remote": "127.0.0.1:9",
    }
    answer = serving.complete(pair.decode.url, ids, kv_transfer_params=loads)
    assert serving.tokens_of(answer) == pair.local(ids)
    assert eventually(lambda: pair.decode.idle)
