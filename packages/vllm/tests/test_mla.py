"""Real vLLM engines with a model that caches one latent for all heads.

On CPUs, what vLLM generates with such a model depends on how it came to its cache: the
last token of a prompt gets one answer in the pass that computes the prompt, and another
by itself. Decode computes it by itself, so tokens cannot be compared. What lies in the
caches of both engines can.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from packages.vllm.tests.support import serving
from packages.vllm.tests.support.digests import CacheDigests
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import Pair, pair_of, running
from packages.vllm.tests.support.serving import Front

BLOCK_TOKENS = 16
LAYERS = 4
pytestmark = [serving.NEEDS_VLLM]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines that say what lies in their caches."""
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model("mla", folder)
    digests = f"{CacheDigests.__module__}.{CacheDigests.__qualname__}"
    more = ("--worker-extension-cls", digests, "--block-size", str(BLOCK_TOKENS))
    transfer = {"lease_s": 3.0, "require": ["tcp"]}
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with pair_of(model, folder, transfer, *more, environment=environment) as made:
        yield made


@pytest.fixture(scope="module")
def proxy(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    engines = serving.before((pair.prefill, pair.decode))
    front = serving.front(tmp_path_factory.mktemp("proxy"), *engines)
    with running(front):
        yield front


def blocks_of(engine: serving.Engine) -> list[set[str]]:
    said = httpx.post(
        f"{engine.url}/collective_rpc",
        json={"method": "block_digests"},
        timeout=serving.ANSWERS_WITHIN_S,
    )
    said.raise_for_status()
    (layers,) = said.json()["results"]
    assert len(layers) == LAYERS
    return [set(layer) for layer in layers]


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize("length", [17, 129, 300, 1500, 3001])
def test_decode_has_the_blocks_that_prefill_computed(
    pair: Pair, proxy: Front, length: int, proxied: bool
) -> None:
    ids = serving.prompt(length, seed=1 + 100 * proxied)
    hits = pair.fetched
    before = [blocks_of(one) for one in (pair.prefill, pair.decode)]
    if proxied:
        assert serving.tokens_of(serving.complete(proxy.url, ids))
    else:
        pair.both(ids)
    after = [blocks_of(one) for one in (pair.prefill, pair.decode)]
    assert pair.fetched - hits == length
    for layer in range(LAYERS):
        computed, fetched = (
            new[layer] - old[layer] for new, old in zip(after, before, strict=True)
        )
        # Decode goes on in the last block, whose other tokens are its own.
        assert len(computed & fetched) == length // BLOCK_TOKENS


def test_blocks_of_another_prompt_are_others(pair: Pair) -> None:
    """Or two engines that compute nothing would pass."""
    ids = serving.prompt(300, seed=2)
    pair.both(ids)
    one = blocks_of(pair.prefill)
    pair.both([ids[0] % 500 + 5, *ids[1:]])
    two = blocks_of(pair.prefill)
    # What the first layer caches of a token depends on that token alone.
    for layer in range(1, LAYERS):
        assert len(two[layer] - one[layer]) >= 300 // BLOCK_TOKENS
