"""A server whose prompts survive `kill -9`, and go on in another engine.

    python examples/engine_server.py --engine transformers --port 8000 /tmp/kv
    curl -d '{"prompt": "The Cat only grinned when", "new": 24}' http://127.0.0.1:8000/

It answers with the model of `make demo`, and keeps the KV of prompts and answers on a
disk. Kill it, start it with `--engine mlx`, and ask with a prompt that begins alike:
what transformers computed, MLX goes on with. Needs torch and transformers, or mlx_lm:
pip install './packages/engines[transformers,mlx]'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from kvwire_store import BlockStore
from kvwire_store.weights import weights_name

MODEL = Path(__file__).parent / "demo" / "model"


class Transformers:
    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        kind = AutoModelForCausalLM.from_pretrained
        self.model = kind(MODEL, dtype=torch.float32).eval()

    def keep_in(self, store: BlockStore, weights: str) -> None:
        from kvwire_engines.transformers import TransformersCaches

        self.kept = TransformersCaches(
            store, self.model, weights=weights, others=["mlx"]
        )

    def cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def generate(self, prompt: list[int], cache: Any, known: int, new: int) -> Any:
        import torch

        ids = torch.tensor([prompt])  # it skips what the cache has
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new}
        mask = torch.ones_like(ids)
        return self.model.generate(ids, cache=cache, attention_mask=mask, **options)[0]


class Mlx:
    def __init__(self) -> None:
        import mlx.core as mx
        from mlx_lm import load

        self.model, self.tokenizer = load(str(MODEL))
        self.model.set_dtype(mx.float32)

    def keep_in(self, store: BlockStore, weights: str) -> None:
        from kvwire_engines.mlx import MlxCaches

        self.kept = MlxCaches(
            store, self.model, weights=weights, others=["transformers"]
        )

    def cache(self) -> Any:
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def generate(self, prompt: list[int], cache: Any, known: int, new: int) -> Any:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        rest = mx.array(prompt[known:])
        steps = generate_step(rest, self.model, max_tokens=new, prompt_cache=cache)
        return [*prompt, *(int(token) for token, _ in steps)]


async def answer(engine: Transformers | Mlx, said: dict[str, Any]) -> dict[str, Any]:
    prompt = list(engine.tokenizer.encode(said["prompt"]))
    cache = engine.cache()
    known = await engine.kept.get(prompt, cache)
    tokens = engine.generate(prompt, cache, known, said.get("new", 24))
    await engine.kept.put(tokens, cache)
    text = engine.tokenizer.decode(tokens[len(prompt) :])
    return {"text": text, "tokens": len(prompt), "known": known}


async def serve(options: argparse.Namespace) -> None:
    try:
        engine = Mlx() if options.engine == "mlx" else Transformers()
    except ModuleNotFoundError as exc:
        install = f"pip install './packages/engines[{options.engine}]'"
        sys.exit(f"{options.engine} needs {exc.name}: {install}")
    tiers = ["memory:64MiB", f"disk:{options.folder}?size=1GiB"]
    async with BlockStore.open(tiers) as store:
        engine.keep_in(store, weights_name(str(MODEL)))

        async def handle(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length:")[2].partition("\r\n")[0])
            said = json.loads(await reader.readexactly(size))
            body = json.dumps(await answer(engine, said)).encode()
            length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n" + length.encode() + body)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", options.port)
        print(f"{options.engine} answers", flush=True)
        async with server:
            await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["transformers", "mlx"], required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("folder", help="where KV is kept")
    asyncio.run(serve(parser.parse_args()))
