"""Sessions of a real llama-server go on at another one, token for token.

Needs xllamacpp, which contains llama.cpp's server, and gguf; `make test-llamacpp`
installs them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from kvwire.errors import UsageError
from kvwire_engines.llamacpp import LlamaCppSessions
from kvwire_engines.llamacpp.sessions import BLOCK_TOKENS, EngineLost
from kvwire_engines.llamacpp.slot_file import read_slot, write_slot
from kvwire_store import BlockStore
from packages.engines.tests.llamacpp.server import (
    LlamaServer,
    llama_server,
    prompt_of,
    serving,
    toy_model,
)

FORMS = {
    "f16": (),
    "q8_0": ("--kv", "q8_0"),
    "q4_0": ("--kv", "q4_0"),
    "no-flash": ("--flash", "DISABLED"),
    "two-slots": ("--parallel", "2"),
}


async def went_on(
    server: LlamaServer, store: BlockStore, prompt: list[int], **keywords: Any
) -> tuple[int, dict[str, Any]]:
    """What a server takes from a store before it answers, and its answer."""
    async with LlamaCppSessions(
        store, server.url, server.folder, **keywords
    ) as sessions:
        known = await sessions.get(0, prompt)
        answer = await server.complete(prompt, id_slot=0)
        await sessions.put(0)
    return known, answer


@pytest.mark.parametrize("form", FORMS)
async def test_a_session_goes_on_at_another_server(
    form: str, model: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(0, 300)
    disk = f"disk:{tmp_path}/kv?size=64MiB"
    async with llama_server(model, tmp_path, *FORMS[form]) as server:
        async with BlockStore.open(["memory:4MiB", disk]) as store:
            known, first = await went_on(server, store, prompt)
        assert known == 0
    longer = prompt + first["tokens"] + prompt_of(1, 5)
    async with llama_server(model, tmp_path, *FORMS[form]) as server:
        async with BlockStore.open(["memory:4MiB", disk]) as store:
            known, second = await went_on(server, store, longer)
        expected = await server.complete(longer, id_slot=0, cache_prompt=False)
    assert known == 9 * BLOCK_TOKENS, "all full blocks of 315 tokens"
    assert second["timings"]["cache_n"] == known
    assert second["tokens"] == expected["tokens"]
    assert not list(server.folder.iterdir()), "each file is removed after its use"


async def test_sessions_with_one_beginning_share_it(
    model: Path, tmp_path: Path
) -> None:
    system = prompt_of(0, 3 * BLOCK_TOKENS)
    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        llama_server(model, tmp_path) as server,
    ):
        await went_on(server, store, system + prompt_of(1, 40))
        known, _ = await went_on(server, store, system + prompt_of(2, 40))
        # Each has 151 tokens, four full blocks, of which three are shared.
        assert store.stats()["memory:64MiB"].blocks == 5
    assert known == len(system)


async def test_each_token_of_the_prompt_counts(model: Path, tmp_path: Path) -> None:
    """Otherwise the tests above would not notice wrong KV."""
    prompt = prompt_of(0, 300)
    async with llama_server(model, tmp_path) as server:
        right = await server.complete(prompt)
        differ = 0
        for at in range(0, 300, 30):
            changed = prompt.copy()
            changed[at] = 97 + (changed[at] - 96) % 25
            answer = await server.complete(changed)
            differ += answer["tokens"] != right["tokens"]
        assert differ >= 8, "of 10"


async def test_what_differs_is_never_restored(model: Path, tmp_path: Path) -> None:
    """Other weights, types, flash attention: each has KV of its own."""
    other = toy_model(tmp_path / "other.gguf", seed=1)
    prompt = prompt_of(0, 100)
    async with BlockStore.open(["memory:64MiB"]) as store:
        for weights, form in ((model, "f16"), (other, "f16"), (model, "no-flash")):
            async with llama_server(weights, tmp_path, *FORMS[form]) as server:
                known, answer = await went_on(server, store, prompt)
                assert known == 0, (weights, form)
                assert answer["timings"]["cache_n"] <= 1
        async with llama_server(model, tmp_path, *FORMS["q8_0"]) as server:
            assert (await went_on(server, store, prompt))[0] == 0
        async with llama_server(model, tmp_path) as server:
            assert (await went_on(server, store, prompt))[0] == 3 * BLOCK_TOKENS


async def test_a_slot_that_holds_more_is_left_alone(
    model: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(0, 100)
    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        llama_server(model, tmp_path) as server,
        LlamaCppSessions(store, server.url, server.folder) as sessions,
    ):
        await server.complete(prompt, id_slot=0)
        assert await sessions.put(0) == 3 * BLOCK_TOKENS
        assert await sessions.get(0, prompt, more_than=96) == 0
        assert await sessions.get(0, prompt, more_than=95) == 96


async def test_a_server_that_is_gone_is_named(model: Path, tmp_path: Path) -> None:
    async with BlockStore.open(["memory:64MiB"]) as store:
        async with llama_server(model, tmp_path) as server:
            pass
        async with LlamaCppSessions(store, server.url, server.folder) as sessions:
            with pytest.raises(EngineLost, match=server.url):
                await sessions.get(0, prompt_of(0, 100))
            with pytest.raises(EngineLost, match=server.url):
                await sessions.put(0)


async def test_a_restore_that_restored_nothing_is_an_error(
    model: Path, tmp_path: Path
) -> None:
    """As in llama.cpp#26676: success is reported, and the slot is empty."""
    prompt = prompt_of(0, 100)

    async def lying(request: web.BaseRequest) -> web.Response:
        if request.query.get("action") == "restore":
            return web.json_response({"n_restored": 0, "n_read": 0})
        url = server.url + request.raw_path
        async with session.request(
            request.method, url, data=await request.read()
        ) as answer:
            return web.Response(status=answer.status, body=await answer.read())

    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        llama_server(model, tmp_path) as server,
        aiohttp.ClientSession() as session,
        serving(lying) as url,
        LlamaCppSessions(store, url, server.folder) as sessions,
    ):
        await went_on(server, store, prompt)
        with pytest.raises(EngineLost, match="restored 0 of 96 tokens"):
            await sessions.get(0, prompt)
        held = await server.complete([97], id_slot=0)
    assert held["timings"]["cache_n"] == 0, "what was restored there is erased"


async def test_a_flipped_block_is_computed_anew(model: Path, tmp_path: Path) -> None:
    """On the disk, at places that a printed seed draws."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    prompt = prompt_of(0, 300)
    tiers = ["memory:4MiB", f"disk:{tmp_path}/kv?size=64MiB"]
    found = []
    async with llama_server(model, tmp_path) as server:
        async with BlockStore.open(tiers) as store:
            _, first = await went_on(server, store, prompt)
        files = [one for one in (tmp_path / "kv").rglob("*") if one.is_file()]
        file = max(files, key=lambda one: one.stat().st_blocks)
        clean = file.read_bytes()
        used = np.flatnonzero(np.frombuffer(clean, np.uint8))
        for _ in range(8):
            damaged = bytearray(clean)
            for at in draw.choices(used, k=draw.randrange(1, 20)):
                damaged[at] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            await server.complete([97], id_slot=0, cache_prompt=False)
            async with BlockStore.open(tiers) as store:
                known, again = await went_on(server, store, prompt)
            found.append(known)
            assert again["tokens"] == first["tokens"], found
    assert min(found) < 9 * BLOCK_TOKENS, found


async def test_the_folder_must_be_the_servers(model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        llama_server(model, tmp_path) as server,
        LlamaCppSessions(store, server.url, elsewhere) as sessions,
    ):
        await server.complete(prompt_of(0, 10), id_slot=0)
        with pytest.raises(UsageError, match="--slot-save-path"):
            await sessions.put(0)
        with pytest.raises(UsageError, match="no such folder"):
            LlamaCppSessions(store, server.url, tmp_path / "none")


async def test_a_damaged_slot_file_is_refused(model: Path, tmp_path: Path) -> None:
    """Whatever is cut off or flipped in its structure; the store checks the rows."""
    async with llama_server(model, tmp_path) as server:
        await server.complete(prompt_of(0, 20), id_slot=0)
        raw = await server.save(0)
    slot = read_slot(raw)
    assert write_slot(slot) == raw
    for length in range(0, len(raw), 97):
        with pytest.raises(UsageError, match="slot file"):
            read_slot(raw[:length])
    with pytest.raises(UsageError, match="4 bytes behind the values"):
        read_slot(raw + bytes(4))
    rng = np.random.default_rng(0)
    for at in rng.integers(0, 12, 40).tolist():
        bad = bytearray(raw)
        bad[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(UsageError, match="slot file"):
            read_slot(bytes(bad))
