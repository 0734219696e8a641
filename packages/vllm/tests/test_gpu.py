"""On a GPU: workers of the vLLM connector, with torch's kernels in a model's place."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

import kvwire
from kvwire_vllm.caches import CacheShape
from kvwire_vllm.config import VllmSettings
from kvwire_vllm.worker import WorkerSide
from packages.vllm.tests.support.fakes import (
    BLOCK_TOKENS,
    BLOCKS,
    DIM,
    FREE,
    HEADS,
    NAMES,
)
from packages.vllm.tests.support.steps import FROM, INTO, fetching, sending
from tests.gpu.devices import Gpu
from tests.support.waiting import eventually

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> Gpu:
    return Gpu("torch")


def tensors() -> dict[str, Any]:
    """A worker's caches, as vLLM gives them."""
    import torch

    shape = (BLOCKS, HEADS, BLOCK_TOKENS, 2 * DIM)
    return {name: torch.full(shape, FREE, device="cuda:0") for name in NAMES}


def side(stack: ExitStack, caches: dict[str, Any], **settings: Any) -> WorkerSide:
    shape = CacheShape(
        block_tokens=BLOCK_TOKENS, kv_heads=HEADS, total_kv_heads=HEADS, head_dim=DIM
    )
    made = WorkerSide(VllmSettings(**settings), kvwire.Config.load(), [shape])
    stack.callback(made.close)
    made.register(caches)
    return made


@pytest.mark.parametrize("stream", ["layer", "chunk"])
def test_kernels_and_copies_wait_for_each_other(gpu: Gpu, stream: str) -> None:
    """Slow kernels before each layer, and before the blocks it goes to are free."""
    source, target = tensors(), tensors()
    with ExitStack() as stack:
        p, d = side(stack, source, stream=stream), side(stack, target)
        d.begin_step(fetching((p.address,)))
        gpu.spin(0.2)
        read = {name: caches.clone() for name, caches in target.items()}
        d.start_loads()
        p.begin_step(sending(FROM, 10, (d.address,)))
        for number, name in enumerate(NAMES):
            gpu.spin(0.05)
            source[name][:] = 1.0 + number
            p.layer_written(name)
        p.step_written()
        assert eventually(lambda: d.finished(()) == (set(), {"d"}))
        assert d.take_errors() == set()
        sent, _ = p.finished(("p",))
        assert sent or eventually(lambda: p.finished(())[0] == {"p"})
    for number, name in enumerate(NAMES):
        assert (target[name][INTO[:2]] == 1.0 + number).all()
        assert (read[name] == FREE).all(), "overwritten while a kernel was reading"
