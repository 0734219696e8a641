"""Real vLLM engines with models of several cache groups."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

from kvwire.security.keys import write_key_file
from tests.integrations.vllm.models import make_model
from tests.integrations.vllm.pairs import Pair, pair_of
from tests.integrations.vllm.serving import (
    NEEDS_VLLM,
    complete,
    prompt,
    tokens_of,
)
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM, pytest.mark.timeout(900)]
WAYS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "short convolutions": ("conv", {}, ()),
    # With prefix caching vLLM's kernel for CPUs breaks at the second checkpoint.
    "Mamba": ("mamba", {}, ("--no-enable-prefix-caching",)),
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
    ids = prompt(length, seed=1)
    hits = pair.fetched
    assert pair.both(ids) == pair.local(ids)
    assert pair.fetched - hits == length - 1


def test_several_at_once(pair: Pair) -> None:
    if "/conv" in " ".join(pair.decode.command):
        pytest.skip("one engine alone answers otherwise in batches with this model")
    pair.check_alike(range(200, 1201, 200), seed=2)


def test_what_decode_has_of_a_beginning(pair: Pair) -> None:
    """The window of the longer prompt lies partly in what decode has."""
    ids = prompt(1000, seed=3)
    pair.both(ids)
    for longer in (1010, 1100, 1600):
        more = ids + prompt(longer - 1000, seed=4)
        assert pair.both(more) == pair.local(more)


def anything(chance: random.Random, address: str, pair: Pair) -> dict[str, Any]:
    """What a client may write as kv_transfer_params."""
    odd: list[Any] = [None, 7, -1.5, "", "x" * 5000, "\u20ac", [], [[]], {}, True]
    remotes = [
        address,
        [address],
        ["127.0.0.1:1", address],
        pair.prefill.kv,
        "unix:///",
    ]
    usual: dict[str, list[Any]] = {
        "do_remote_prefill": [True, False],
        "do_remote_decode": [True, False],
        "transfer_id": ["t", "fuzz/0/0"],
        "remote": [*remotes, [pair.decode.kv] * 3],
        "signature": ["00" * 32],
    }
    written = {name: chance.choice(values) for name, values in usual.items()}
    for name in chance.sample(sorted(usual), chance.choice((0, 0, 1, 2))):
        written[name] = chance.choice(odd)
    for name in chance.sample(sorted(usual), chance.choice((0, 0, 1))):
        del written[name]
    return written


def test_whatever_clients_write_harms_nobody(pair: Pair) -> None:
    """Made-up references are not dialled, and each answer is that of its own prompt."""
    if "psk" not in " ".join(pair.decode.command):
        pytest.skip("without a key or peers, addresses of this host are believed")
    chance = random.Random(17)
    prompts = [prompt(60, seed=100 + index) for index in range(4)]
    want = [tokens_of(pair.prefill.generate(ids, 4)) for ids in prompts]

    def ask(at: int, params: Any) -> bool:
        one = chance.choice((pair.prefill, pair.decode))
        try:
            said = one.generate(prompts[at], 4, kv_transfer_params=params)
        except httpx.HTTPStatusError as exc:
            return exc.response.status_code == httpx.codes.BAD_REQUEST
        return tokens_of(said) == want[at]

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        asked = [anything(chance, address, pair) for _ in range(300)]
        with ThreadPoolExecutor(6) as pool:
            right = list(pool.map(ask, (at % 4 for at in range(300)), asked))
        assert all(right)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    ids = prompt(700, seed=6)
    assert pair.both(ids) == pair.local(ids)
    assert eventually(lambda: pair.idle)


def test_a_prompt_that_is_not_there_is_computed(pair: Pair) -> None:
    """All of a request, since vLLM takes no block ids of several groups."""
    ids = prompt(700, seed=5)
    loads = {
        "do_remote_prefill": True,
        "transfer_id": "nobody",
        "remote": "127.0.0.1:9",
    }
    answer = complete(pair.decode.url, ids, kv_transfer_params=loads)
    assert tokens_of(answer) == pair.local(ids)
    assert eventually(lambda: pair.decode.idle)
