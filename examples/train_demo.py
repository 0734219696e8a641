"""Train the demo's checkpoint: a small Llama that knows one book by heart.

    make .venv-torch/.installed
    .venv-torch/bin/python examples/train_demo.py

It made the weights of `make demo`, on one CPU thread, in about 25 minutes. Two million
parameters and 140 kB of text are enough to learn the book and nothing else, which suits
the demo: a passage of the book goes in, the next sentences come out, and a single wrong
block of the cache shows as broken English.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.llama import CHECKPOINT, CONTEXT

TEXT: Final = CHECKPOINT / "alice.txt"

SEED: Final = 1865
VOCABULARY: Final = 1024
BATCH: Final = 8
PEAK_RATE: Final = 3e-3
WARM_UP_STEPS: Final = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--into", type=Path, default=CHECKPOINT)
    options = parser.parse_args()
    # One thread, because sums over several threads are rounded differently.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    text = TEXT.read_text(encoding="ascii")
    tokenizer = train_tokenizer(text)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    model = LlamaForCausalLM(architecture())
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{tokens.numel()} tokens, {weights} weights, {options.steps} steps")
    train(model, tokens, options.steps)
    save(model, tokenizer, options.into)


def train_tokenizer(text: str) -> Tokenizer:
    """Train byte-level pairs, merged as often as the vocabulary allows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def architecture() -> LlamaConfig:
    """Return eight narrow layers, not few wide ones: the demo streams layers."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def train(model: LlamaForCausalLM, tokens: torch.Tensor, steps: int) -> None:
    """Train with AdamW on random windows of the text; warm-up, then half a cosine."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    offsets = torch.arange(CONTEXT)
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * schedule(step, steps)
        starts = torch.randint(tokens.numel() - CONTEXT, (BATCH, 1))
        window = tokens[starts + offsets]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=window, labels=window).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49 or step == steps - 1:
            took = time.perf_counter() - began
            print(
                f"step {step + 1:5}  loss {loss.item():.3f}  {took:6.0f} s", flush=True
            )


def schedule(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, into: Path) -> None:
    """Save the weights as safetensors in bfloat16: half the size, and as good."""
    model.to(torch.bfloat16).save_pretrained(into)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(into)
    size = (into / "model.safetensors").stat().st_size
    print(f"{into / 'model.safetensors'}: {size} bytes")


if __name__ == "__main__":
    main()
