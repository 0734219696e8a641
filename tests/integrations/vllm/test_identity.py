"""What an engine says of its draft model, and of its attention kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvwire.integrations.vllm.identity import block_order, draft_name

TARGET, EAGLE = SimpleNamespace(), SimpleNamespace(architectures=["Eagle"])


@pytest.mark.parametrize(
    ("speculative", "name"),
    [
        (None, "none"),
        # Prompts that are looked up in themselves.
        ({"draft_model_config": TARGET, "target_model_config": TARGET}, "none"),
        ({"draft_model_config": None}, "none"),
        ({"draft_model_config": EAGLE, "method": "eagle"}, "eagle of Eagle"),
    ],
)
def test_the_draft_model_has_a_name(
    speculative: dict[str, Any] | None, name: str
) -> None:
    said = SimpleNamespace(**speculative) if speculative else None
    assert draft_name(SimpleNamespace(speculative_config=said)) == name


@pytest.mark.parametrize(
    ("module", "order"),
    [
        ("vllm.v1.attention.backends.flash_attn", "whole tokens"),
        ("vllm.v1.attention.backends.mla.triton_mla", "whole tokens"),
        # Its keys have the token as the last axis, or lie in tiles.
        ("vllm.v1.attention.backends.cpu_attn", "cpu_attn with blocks of 16"),
        ("somebody.else", "else with blocks of 16"),
        (None, "unknown with blocks of 16"),
    ],
)
def test_blocks_are_only_cut_where_the_kernel_is_known(
    module: str | None, order: str
) -> None:
    """Two of them that are not by token have to be the same."""
    backend = type("Backend", (), {"__module__": module})
    layer = SimpleNamespace(get_attn_backend=lambda: backend) if module else None
    spec, state = SimpleNamespace(block_size=16), SimpleNamespace(shapes=[(2,)])
    groups = [
        SimpleNamespace(kv_cache_spec=state, layer_names=["s"]),
        SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]),
    ]
    layers = {"a": layer, "b": layer}
    said = SimpleNamespace(static_forward_context=layers)
    config = SimpleNamespace(compilation_config=said)
    assert block_order(config, SimpleNamespace(kv_cache_groups=groups)) == order
