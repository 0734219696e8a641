"""The demo's model: a small Llama that knows a book by heart, on a paged cache."""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from examples.demo.lines import LayerSpan
from examples.demo.settings import BLOCK_TOKENS, CHECKPOINT
from kvwire.integrations.transformers import PagedSequence, TensorPool, kv_spec

# Two processes that compute at once share what is often two cores.
THREADS: Final = 1


class Forward(NamedTuple):
    """What a forward pass gave.

    Attributes:
        token: The most likely next one.
        spans: When each layer was computed.
    """

    token: int
    spans: list[LayerSpan]


class Llama:
    """Model and tokenizer; forward passes of one sequence at a time.

    Attributes:
        model: The transformers model, in float32.
        tokenizer: Bytes to tokens and back.
    """

    def __init__(self) -> None:
        torch.set_num_threads(THREADS)
        logging.disable_progress_bar()
        self.model = LlamaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        self.model.eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
        self._clock = LayerClock(self.model)

    def pool(self, num_blocks: int) -> TensorPool:
        """Blocks for this model's KV."""
        spec = kv_spec(
            self.model.config,
            block_tokens=BLOCK_TOKENS,
            dtype=self.model.dtype,
            fingerprint="examples/demo/model",
        )
        return TensorPool(spec, num_blocks)

    def warm_up(self) -> None:
        """Pay for the first forward pass before anything is timed."""
        pool = self.pool(2)
        self.forward([0] * 20, PagedSequence(pool, [0, 1]))
        self._clock.take()

    def forward(self, tokens: list[int], cache: PagedSequence) -> Forward:
        """Compute the KV of some tokens, and which token would follow.

        Args:
            tokens: Those behind what the cache holds.
            cache: Where their KV goes, and that of the tokens before lies.

        """
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits
        return Forward(int(logits[0, -1].argmax()), self._clock.take())

    def generate(self, tokens: list[int], new: int) -> list[int]:
        """What the model says by itself: transformers' own cache and loop."""
        ids = torch.tensor([tokens])
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, pad_token_id=0, **options
            )
        continuation: list[int] = out[0, len(tokens) :].tolist()
        return continuation


class LayerClock:
    """Notes when each decoder layer of a forward pass began and ended."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._spans: list[LayerSpan] = []
        self._began = 0.0
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end_of(index))

    def take(self) -> list[LayerSpan]:
        """The spans since the last time."""
        spans, self._spans = self._spans, []
        return spans

    def _begin(self, module: object, inputs: object) -> None:
        self._began = time.monotonic()

    def _end_of(self, index: int) -> Any:
        def end(module: object, inputs: tuple[torch.Tensor], output: object) -> None:
            # A layer is called with its hidden states, (1, tokens, hidden).
            tokens = inputs[0].shape[1]
            self._spans.append(LayerSpan(index, tokens, self._began, time.monotonic()))

        return end
