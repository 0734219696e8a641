"""Sessions of real llama-servers are kept, and continued by other servers.

Needs xllamacpp and gguf; `make test-llamacpp` installs them.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Final

import aiohttp
import aiohttp.web
import numpy as np
import pytest

_WHY: Final = "not installed here; `make test-llamacpp` installs it"
gguf = pytest.importorskip("gguf", reason=f"gguf: {_WHY}")
pytest.importorskip("xllamacpp", reason=f"xllamacpp: {_WHY}")

from kvwire_engines.llamacpp import (  # noqa: E402
    LlamaSessions,
    LlamaSlots,
    SlotFailed,
    slot_tokens,
)
from kvwire_store import BlockStore  # noqa: E402
from kvwire_store.weights import weights_name  # noqa: E402

VOCABULARY: Final = 320
PROMPT: Final = [1, *(3 + number * 7919 % 250 for number in range(3000))]
WIDTH: Final = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, whose tokens depend on all of its KV."""
    path: Path = tmp_path_factory.mktemp("llama") / "m.gguf"
    random_of = np.random.default_rng(7)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(16_384)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    more = range(len(tokens), VOCABULARY)
    writer.add_token_list([*tokens, *(f"\u2581w{number}" for number in more)])
    writer.add_token_types([*kinds, *[1] * len(more)])
    writer.add_token_scores([0.0] * VOCABULARY)
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (WIDTH // 2, WIDTH),
        "attn_v": (WIDTH // 2, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (2 * WIDTH, WIDTH),
        "ffn_up": (2 * WIDTH, WIDTH),
        "ffn_down": (WIDTH, 2 * WIDTH),
    }
    named = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH)}
    for layer in range(2):
        named |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        for name in ("attn_norm", "ffn_norm"):
            ones = np.ones(WIDTH, np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for name, shape in named.items():
        values = random_of.standard_normal(shape) * 2 / np.sqrt(shape[-1])
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextmanager
def serving(model: Path, folder: Path, cache_type: str = "f16") -> Iterator[str]:
    """A server in a process of its own, which is killed at the end."""
    folder.mkdir(exist_ok=True)
    program = [sys.executable, "-m", "packages.engines.tests.llama_server"]
    process = Popen(
        [*program, str(model), str(folder), cache_type], stdout=PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@asynccontextmanager
async def sessions_of(
    model: Path, tmp_path: Path, url: str
) -> AsyncIterator[tuple[LlamaSlots, LlamaSessions]]:
    tiers = ["memory:32MiB", f"disk:{tmp_path / 'kv'}?size=64MiB"]
    async with aiohttp.ClientSession() as http, BlockStore.open(tiers) as store:
        server = LlamaSlots(url, tmp_path / "slots", http)
        yield server, LlamaSessions(store, server, weights=weights_name(str(model)))


async def answer(server: LlamaSlots, slot: int, prompt: list[int]) -> Any:
    asked = {"prompt": prompt, "n_predict": 16, "id_slot": slot, "temperature": 0}
    asked |= {"return_tokens": True, "cache_prompt": True, "ignore_eos": True}
    return await server.ask("/completion", asked)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q4_0"])
async def test_a_session_goes_on_after_kill_9(
    model: Path, tmp_path: Path, cache_type: str
) -> None:
    with serving(model, tmp_path / "slots", cache_type) as url:
        async with sessions_of(model, tmp_path, url) as (server, sessions):
            assert await sessions.restore(0, PROMPT) == 0
            begin = time.perf_counter()
            first = await answer(server, 0, PROMPT)
            computed_s = time.perf_counter() - begin
            assert await sessions.save(0, PROMPT) == len(PROMPT) + 15
    with serving(model, tmp_path / "slots", cache_type) as url:
        async with sessions_of(model, tmp_path, url) as (server, sessions):
            begin = time.perf_counter()
            assert await sessions.restore(1, PROMPT) >= len(PROMPT) - 64
            again = await answer(server, 1, PROMPT)
            restored_s = time.perf_counter() - begin
            assert again["tokens"] == first["tokens"]
            assert again["timings"]["cache_n"] == len(PROMPT) - 1
            # Another prompt with the same beginning goes on from there.
            other = [*PROMPT[:1000], 9, 8, 7]
            assert await sessions.restore(0, other) == 960
            kept = await answer(server, 0, other)
            await server.erase(0)
            assert kept["timings"]["cache_n"] == 1000
            assert kept["tokens"] == (await answer(server, 0, other))["tokens"]
    print(f"{cache_type}: {computed_s:.3f} s computed, {restored_s:.3f} s restored")


async def test_what_is_cut_or_flipped_is_computed_anew(
    model: Path, tmp_path: Path
) -> None:
    """On the disk, at places that a printed seed draws; below the tier's checks too."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    with serving(model, tmp_path / "slots") as url:
        async with sessions_of(model, tmp_path, url) as (server, sessions):
            await sessions.restore(0, PROMPT)
            first = await answer(server, 0, PROMPT)
            assert await sessions.save(0, PROMPT)
        files = [one for one in (tmp_path / "kv").rglob("*") if one.is_file()]
        file = max(files, key=lambda one: one.stat().st_blocks)
        clean = file.read_bytes()
        found = []
        for _ in range(6):
            damaged = bytearray(clean)
            used = np.flatnonzero(np.frombuffer(clean, np.uint8))
            for _ in range(40):
                damaged[int(draw.choice(used))] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            async with sessions_of(model, tmp_path, url) as (server, sessions):
                await server.erase(1)
                found.append(await sessions.restore(1, PROMPT))
                again = await answer(server, 1, PROMPT)
                assert again["tokens"] == first["tokens"]
        assert 0 in found


async def test_a_damaged_slot_file_is_refused(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "slots") as url:
        async with sessions_of(model, tmp_path, url) as (server, _):
            first = await answer(server, 0, PROMPT)
            data = await server.save(0)
            for nbytes in (0, 8, 400, len(data) // 2):
                with pytest.raises(SlotFailed, match=r"is cut|Unable to restore"):
                    await server.restore(1, data[:nbytes])
            assert await server.restore(1, data) == len(slot_tokens(data))
            assert (await answer(server, 1, PROMPT))["tokens"] == first["tokens"]


async def test_another_cache_type_finds_nothing(model: Path, tmp_path: Path) -> None:
    facts = []
    for cache_type in ("f16", "q8_0"):
        with serving(model, tmp_path / "slots", cache_type) as url:
            async with sessions_of(model, tmp_path, url) as (server, sessions):
                assert await sessions.restore(0, PROMPT) == 0
                await answer(server, 0, PROMPT)
                await sessions.save(0, PROMPT)
                assert sessions.facts is not None
                facts.append(sessions.facts)
    assert [one.cache_type_k for one in facts] == ["f16", "q8_0"]


async def test_a_restore_that_restored_nothing_is_an_error(tmp_path: Path) -> None:
    """As in llama.cpp#26676: success is reported, and the slot is empty."""
    erased = []

    async def answers(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        erased.append(request.query["action"])
        return aiohttp.web.json_response({"n_restored": 0, "n_read": 0})

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(answers))
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    data = np.array([0x67677371, 4, 5, 2**32 - 1, 1, 1, 7, 0], "<u4").tobytes()
    async with aiohttp.ClientSession() as http:
        server = LlamaSlots(f"http://{host}:{port}", tmp_path, http)
        with pytest.raises(SlotFailed, match="restored 0 tokens of 1"):
            await server.restore(0, data)
    assert erased == ["restore", "erase"]
    assert not await asyncio.to_thread(lambda: list(tmp_path.iterdir()))
    await runner.cleanup()
