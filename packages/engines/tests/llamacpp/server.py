"""A real llama-server in a process of its own, with a small model of random weights.

Usage::

    model = toy_model(tmp_path / "toy.gguf")
    async with llama_server(model, tmp_path, "--kv", "q8_0") as server:
        answer = await server.complete(prompt)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from aiohttp import web

from tests.support.runs import Beside, beside

LAYERS: Final = 4
_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD: Final = 64
_WIDTH: Final = _HEADS * _HEAD
_HIDDEN: Final = 128
VOCABULARY: Final = 258


def toy_model(
    path: Path, seed: int = 0, more: Mapping[str, float] | None = None
) -> Path:
    """Write a model each of whose tokens depends on all of its KV, with more keys."""
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(16384)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(_HIDDEN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_rope_freq_base(10000.0)
    for key, value in (more or {}).items():
        writer.add_float32(f"llama.{key}", value)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_byte_tokens(), "<s>", "</s>"])
    writer.add_token_types([1] * 256 + [3, 3])
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        drawn = rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)
        if name == "output":
            # Never the likeliest: the server gives no probability of half a character.
            drawn[[*range(32), *range(127, rows)]] = 0.0
        writer.add_tensor(f"{name}.weight", drawn.astype(np.float32))

    def ones(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))

    matrix("token_embd", VOCABULARY, _WIDTH, 0.5 * np.sqrt(_WIDTH))
    ones("output_norm")
    matrix("output", VOCABULARY, _WIDTH, 3.0)
    for layer in range(LAYERS):
        ones(f"blk.{layer}.attn_norm")
        ones(f"blk.{layer}.ffn_norm")
        matrix(f"blk.{layer}.attn_q", _WIDTH, _WIDTH, 3.0)
        matrix(f"blk.{layer}.attn_k", _KV_HEADS * _HEAD, _WIDTH)
        matrix(f"blk.{layer}.attn_v", _KV_HEADS * _HEAD, _WIDTH)
        matrix(f"blk.{layer}.attn_output", _WIDTH, _WIDTH, 4.0)
        matrix(f"blk.{layer}.ffn_gate", _HIDDEN, _WIDTH)
        matrix(f"blk.{layer}.ffn_up", _HIDDEN, _WIDTH)
        matrix(f"blk.{layer}.ffn_down", _WIDTH, _HIDDEN, 2.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def made_from(file: Path, folder: Path) -> Path:
    """Save the weights of a toy for other engines, as transformers converts them."""
    import torch
    import tqdm  # type: ignore[import-untyped]
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tqdm.tqdm.monitor_interval = 0  # it would leave a thread behind
    fields = load_gguf_checkpoint(str(file))["config"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    model.load_state_dict(loaded["tensors"])
    model.to(torch.float32).save_pretrained(folder)
    return folder


def prompt_of(seed: int, tokens: int) -> list[int]:
    """Return the tokens of a prompt."""
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(97, 122, tokens)]


class LlamaServer(Beside):
    """The process, with what the tests ask of it.

    Attributes:
        url: Its address.
        folder: Its folder of slot files.
    """

    url: str
    folder: Path

    async def kill(self) -> None:
        """End it as `kill -9` does."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def save(self, slot: int) -> bytes:
        """Return the file of a slot."""
        path = self.folder / "saved"
        where = f"{self.url}/slots/{slot}?action=save"
        async with (
            aiohttp.ClientSession() as session,
            session.post(where, json={"filename": path.name}) as response,
        ):
            assert response.status == 200, await response.text()
        raw = await asyncio.to_thread(path.read_bytes)
        await asyncio.to_thread(path.unlink)
        return raw

    async def complete(
        self,
        prompt: Sequence[int] | str,
        *,
        url: str = "",
        count: int = 16,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the answer with greedy tokens, also from a front at `url`."""
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "return_tokens": True,
            "ignore_eos": True,
            **more,
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url or self.url}/completion", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found


@contextlib.asynccontextmanager
async def llama_server(
    model: Path, folder: Path, *arguments: str, under: tuple[str, ...] = ()
) -> AsyncIterator[LlamaServer]:
    """Run a server, perhaps under a command; see the module for its arguments."""
    slots = folder / "slots"
    slots.mkdir(exist_ok=True)
    command = ("-m", __name__, str(model), str(slots), *arguments)
    async with beside(*command, kind=LlamaServer, under=under) as server:
        server.url = await server.line()
        server.folder = slots
        yield server


@contextlib.asynccontextmanager
async def front_beside(
    server: LlamaServer, *tiers: str, under: tuple[str, ...] = ()
) -> AsyncIterator[LlamaServer]:
    """Run a front of a server as a user does, over a store of these tiers.

    It answers as its server does.
    """
    command = ["-m", "kvwire", "session", "serve", "--engine", server.url]
    command += ["--slots", str(server.folder), "--listen", "127.0.0.1:0"]
    command += [word for tier in tiers for word in ("--tier", tier)]
    async with beside(*command, kind=LlamaServer, logs=True, under=under) as front:
        front.url = (await front.line()).partition(" on ")[2].partition(",")[0]
        front.folder = server.folder
        yield front


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """Serve HTTP in this process, as something in the place of llama-server does."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _byte_tokens() -> list[str]:
    """Return GPT-2's characters for the 256 bytes, so that a token is a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def main() -> None:
    """Serve until the process is killed."""
    import xllamacpp

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("slots")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--flash", default="AUTO")
    options = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.port = options.port
    parameters.slot_save_path = f"{options.slots}/"
    parameters.n_ctx = 16384
    parameters.n_parallel = options.parallel
    parameters.endpoint_slots = parameters.endpoint_props = True
    parameters.warmup = parameters.fit_params = False
    parameters.verbosity = 1  # errors
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options.kv.upper()}")
    parameters.cache_type_k = parameters.cache_type_v = kind
    flash = f"LLAMA_FLASH_ATTN_TYPE_{options.flash}"
    parameters.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, flash)
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
