"""What a slot file's keys and values are, against the weights in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire_engines.llamacpp.slot_file import read_slot
from packages.engines.tests.llamacpp.server import llama_server, prompt_of

HEADS, WIDTH = 2, 64
THETA, EPSILON = 10_000.0, 1e-5


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("f16", np.float16)])
async def test_rows_are_heads_with_neighbouring_elements_rotated(
    kind: str, dtype: Any, model: Path, tmp_path: Path
) -> None:
    """Keys of one token and layer: head by head, elements 2n and 2n + 1 a pair.

    Hugging Face's elements n and n + width / 2 are a pair. The conversion to GGUF moves
    the rows of ``k_proj`` so, and the keys with them; values stay in order.
    """
    prompt = prompt_of(0, 300)
    async with llama_server(model, tmp_path, "--kv", kind) as server:
        await server.complete(prompt, id_slot=0, count=1)
        slot = read_slot(await server.save(0))
    elements = np.ascontiguousarray(slot.rows[0]).view(dtype).astype(np.float64)
    keys, values = np.split(elements[: len(prompt)], 2, axis=1)

    weights = weights_of(model)
    inputs = weights["token_embd.weight"][prompt]
    inputs /= np.sqrt((inputs**2).mean(axis=1, keepdims=True) + EPSILON)
    plain = (inputs @ weights["blk.0.attn_k.weight"].T).reshape(-1, HEADS, WIDTH)
    # To Hugging Face's order, which rotates halves.
    halves = np.concatenate((plain[..., ::2], plain[..., 1::2]), axis=-1)
    angles = np.arange(len(prompt))[:, None] * THETA ** (-np.arange(0, 64, 2) / 64)
    cos, sin = (np.tile(part, 2)[:, None] for part in (np.cos(angles), np.sin(angles)))
    first, second = np.split(halves, 2, axis=-1)
    expected = halves * cos + np.concatenate((-second, first), axis=-1) * sin

    found = keys.reshape(-1, HEADS, WIDTH)
    found = np.concatenate((found[..., ::2], found[..., 1::2]), axis=-1)
    limit = 2e-2 if kind == "f16" else 2e-3
    assert abs(found - expected).max() < limit
    assert abs(values - inputs @ weights["blk.0.attn_v.weight"].T).max() < limit


def weights_of(model: Path) -> dict[str, Any]:
    import gguf

    return {
        one.name: np.array(one.data, np.float64)
        for one in gguf.GGUFReader(model).tensors
    }
