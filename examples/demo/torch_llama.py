"""The same model in transformers, with KV in kvwire's blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from demo.lines import LayerSpan
from demo.llama import (
    BLOCK_TOKENS,
    CHECKPOINT,
    Forward,
    Llama,
    OnWritten,
)
from kvwire_engines.transformers import PagedSequence, TensorPool, kv_spec


class TorchLlama(Llama):
    """Computes with transformers, with its KV in blocks of a pool."""

    def __init__(self, num_blocks: int) -> None:
        # Two processes that compute at the same time often share two cores.
        torch.set_num_threads(1)
        logging.disable_progress_bar()
        self._model = LlamaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        self._model.eval()
        self._clock = LayerClock(self._model)
        spec = kv_spec(
            self._model.config,
            block_tokens=BLOCK_TOKENS,
            dtype=self._model.dtype,
            fingerprint="the demo",
        )
        self._pool = TensorPool(spec, num_blocks)
        self.cache = self._pool.cache

    def sequence(
        self,
        blocks: Sequence[int],
        *,
        length: int = 0,
        on_written: OnWritten | None = None,
    ) -> PagedSequence:
        """Return a sequence whose attention reads its blocks."""
        return PagedSequence(self._pool, blocks, length=length, on_written=on_written)

    def forward(self, tokens: list[int], sequence: PagedSequence) -> Forward:
        """See :class:`Llama`."""
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = self._model(ids, cache=sequence, logits_to_keep=1).logits
        return Forward(int(logits[0, -1].argmax()), self._clock.take())

    def generate(self, tokens: list[int], new: int) -> list[int]:
        """Generate with transformers' own cache and loop."""
        ids = torch.tensor([tokens])
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, pad_token_id=0, **options
            )
        continuation: list[int] = out[0, len(tokens) :].tolist()
        return continuation


class LayerClock:
    """Records when each decoder layer of a forward pass began and ended."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._spans: list[LayerSpan] = []
        self._began = 0.0
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end_of(index))

    def take(self) -> list[LayerSpan]:
        """Return the spans recorded since the last call."""
        spans = self._spans
        self._spans = []
        return spans

    def _begin(self, module: object, inputs: object) -> None:
        self._began = time.monotonic()

    def _end_of(self, index: int) -> Any:
        def end(module: object, inputs: tuple[torch.Tensor], output: object) -> None:
            # A layer is called with its hidden states, (1, tokens, hidden).
            tokens = inputs[0].shape[1]
            self._spans.append(LayerSpan(index, tokens, self._began, time.monotonic()))

        return end
