"""What an engine says of its draft model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvwire.integrations.vllm.identity import draft_name

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
