"""vLLM on CPUs prefills, transformers decodes: over a store server, with a real engine.

Needs vLLM, and the transformers that it brings; `make test-vllm` installs them.
"""

from __future__ import annotations

import pytest

from packages.vllm.tests.support.serving import NEEDS_VLLM

pytestmark = [NEEDS_VLLM]

torch = pytest.importorskip("torch", reason="torch: `make test-vllm` installs it")

from kvwire_engines.sources import PACKINGS  # noqa: E402


@pytest.mark.parametrize(
    ("kernel", "dtype", "block_tokens", "width"),
    [
        ("vec", "float32", 32, 64),
        ("vec", "bfloat16", 128, 64),
        ("vec", "float16", 64, 32),
        ("vec16", "float32", 16, 48),
        ("amx", "bfloat16", 32, 64),
        ("amx", "bfloat16", 64, 128),
    ],
)
def test_a_packing_is_that_of_the_kernel(
    kernel: str, dtype: str, block_tokens: int, width: int
) -> None:
    from vllm import _C, _custom_ops

    assert _C
    heads, blocks = 2, 3
    size = (blocks * block_tokens, heads, width)
    keys, values = torch.randn(2, *size).to(getattr(torch, dtype))
    cache = torch.zeros(blocks, heads, 2 * block_tokens, width, dtype=keys.dtype)
    slots = torch.arange(blocks * block_tokens)
    _custom_ops.cpu_attn_reshape_and_cache(
        keys, values, *cache.chunk(2, dim=2), slots, kernel
    )
    packed = cache.reshape(blocks, heads, 2, -1).float().numpy()
    for part, expected in enumerate((keys, values)):
        unpack = PACKINGS[f"cpu_attn {kernel}"][part]
        found = torch.from_numpy(unpack(packed[:, :, part], width).copy())
        wanted = expected.view(blocks, block_tokens, heads, width).transpose(1, 2)
        assert torch.equal(found, wanted.float())


def test_vllm_prefills_and_transformers_decodes() -> None:
    """All full blocks come from vLLM, and transformers answers as it does alone.

    `python -m packages.certify.tests.bench prefills` does it with more prompts.
    """
    pytest.importorskip("gguf", reason="gguf: `make test-vllm` installs it")
    from packages.certify.tests.bench import prefills

    found = prefills.measure(prompts=4, seed=1)["vLLM's KV"]
    assert found["equal"] + found["near ties"] == 4, found
    assert found["known"] > found["tokens"] / 2
    assert found["apart"] < prefills.NEAR_TIE
