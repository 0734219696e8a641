"""An agent whose prompt grows with each tool call, with and without a store.

Each call of the model has the whole conversation as its prompt. This engine keeps
nothing between two calls, as if each call went to another engine; half-way it is a new
process. With a store it computes only the tokens that no earlier call has computed;
without one it computes all of them.

    python agent_loop.py --turns 8 --tool-tokens 250 --plot agent.svg

Needs torch and transformers: `make demo-agent` installs both, and matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvwire
from kvwire.integrations.transformers import PagedSequence, TensorPool, kv_spec
from kvwire.kv.hashing import HashScheme

BLOCK_TOKENS = 16
ANSWER_TOKENS = 16
VOCABULARY = 512


def load() -> Any:
    """A Llama of 4 layers with random weights, which are the same in every process."""
    torch.manual_seed(7)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=65536,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tool(turn: int, tokens: int) -> list[int]:
    """The tool's output in a turn."""
    chance = torch.Generator().manual_seed(turn)
    said: list[int] = torch.randint(VOCABULARY, (tokens,), generator=chance).tolist()
    return said


async def call(
    model: Any, pool: TensorPool, tokens: list[int], store: kvwire.BlockStore | None
) -> tuple[list[int], dict[str, float]]:
    """Call the model once; return its answer, and the cost of the call."""
    began = time.perf_counter()
    blocks = list(range(-(-(len(tokens) + ANSWER_TOKENS) // BLOCK_TOKENS)))
    # The last token is computed in any case: the answer begins with its output.
    hashes = HashScheme(BLOCK_TOKENS).block_hashes(tokens[:-1])
    known = 0
    if store is not None and (found := await store.match(hashes, pool.cache)):
        outcome = await store.get(hashes[:found], pool.cache, blocks[:found])
        known = outcome.usable_prefix * BLOCK_TOKENS
    sequence = PagedSequence(pool, blocks, length=known)
    answer: list[int] = []
    fresh = tokens[known:]
    first_s = 0.0
    with torch.inference_mode():
        for _ in range(ANSWER_TOKENS):
            said = model(torch.tensor([fresh]), cache=sequence)
            answer.append(int(said.logits[0, -1].argmax()))
            first_s = first_s or time.perf_counter() - began
            fresh = answer[-1:]
    if store is not None:
        hashes = HashScheme(BLOCK_TOKENS).block_hashes(tokens + answer[:-1])
        await store.put(hashes, pool.cache, blocks[: len(hashes)])
    computed = len(tokens) - known
    return answer, {"prompt": len(tokens), "computed": computed, "ttft_s": first_s}


async def child(folder: Path, turns: range, tool_tokens: int, stored: bool) -> None:
    """Continue a conversation in this process, and write its state to a file."""
    file = folder / ("with" if stored else "without")
    said = json.loads(file.read_text()) if file.exists() else {"tokens": [], "rows": []}
    model = load()
    most = turns.stop * (tool_tokens + ANSWER_TOKENS) + BLOCK_TOKENS
    spec = kv_spec(model.config, block_tokens=BLOCK_TOKENS, dtype=model.dtype)
    tiers = ["memory:256MiB", f"disk:{folder / 'kv'}?size=1GiB"]
    store = await kvwire.BlockStore.open(tiers) if stored else None
    for turn in turns:
        pool = TensorPool(spec, most // BLOCK_TOKENS + 1)
        said["tokens"] += tool(turn, tool_tokens)
        answer, row = await call(model, pool, said["tokens"], store)
        said["tokens"] += answer
        said["rows"].append(row)
    if store is not None:
        await store.close()
    file.write_text(json.dumps(said))


def plot(file: str, rows: dict[str, list[dict[str, float]]]) -> None:
    """Plot the time to the first token over the length of the prompt."""
    from matplotlib import pyplot as plt  # noqa: PLC0415 - only for a picture

    for name, row in rows.items():
        x = [one["prompt"] for one in row]
        y = [one["ttft_s"] for one in row]
        plt.plot(x, y, marker="o", label=f"{name} a store")
    plt.xlabel("tokens of the prompt; half-way a new process")
    plt.ylabel("seconds to the first token")
    plt.legend()
    plt.savefig(file)


def main() -> None:
    """Run the loop twice, each time in two processes, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tool-tokens", type=int, default=250)
    parser.add_argument("--plot", default="", help="a picture")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, start, stop, name = options.child
        turns = range(int(start), int(stop))
        asyncio.run(child(Path(folder), turns, options.tool_tokens, name == "with"))
        return
    half = options.turns // 2
    rows: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        conversations = []
        for name in ("without", "with"):
            for start, stop in ((0, half), (half, options.turns)):
                part = ["--child", folder, str(start), str(stop), name]
                size = ["--tool-tokens", str(options.tool_tokens)]
                command = [sys.executable, __file__, *size, *part]
                subprocess.run(command, check=True)  # noqa: S603 - this very file
            said = json.loads((Path(folder) / name).read_text())
            conversations.append(said["tokens"])
            rows[name] = said["rows"]
    assert conversations[0] == conversations[1], "the store has changed the answers"
    print("turn  prompt   without: computed  TTFT   with: computed  TTFT")
    for turn, (plain, kept) in enumerate(zip(*rows.values(), strict=True)):
        print(
            f"{turn:4}  {plain['prompt']:6}  {plain['computed']:17} "
            f"{plain['ttft_s'] * 1000:4.0f} ms  {kept['computed']:14} "
            f"{kept['ttft_s'] * 1000:4.0f} ms{'   a new process' * (turn == half)}"
        )
    print(f"{len(conversations[0])} tokens, the same with and without a store")
    if options.plot:
        plot(options.plot, rows)


if __name__ == "__main__":
    main()
