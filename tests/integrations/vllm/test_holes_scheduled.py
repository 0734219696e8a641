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

from tests.support.engines.models import make_model
from tests.support.engines.scheduling import BLOCK_TOKENS, next_token, rig
from tests.support.engines.serving import prompt

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
