"""transformers or MLX prefills, llama.cpp goes on: the same weights in two files.

Needs torch, transformers and mlx_lm beside xllamacpp and gguf: `make test-torch`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest

from kvwire.errors import UsageError
from kvwire_engines.caches import Caches
from kvwire_engines.llamacpp import LlamaCppSessions
from kvwire_engines.llamacpp.others import OTHERS
from kvwire_store import BlockStore
from kvwire_store.weights import weights_name
from packages.engines.tests.llamacpp.server import (
    llama_server,
    made_from,
    prompt_of,
    toy_model,
)

_WHY: Final = "not installed here; `make test-torch` installs it"
torch = pytest.importorskip("torch", reason=f"torch: {_WHY}")
transformers = pytest.importorskip("transformers", reason=f"transformers: {_WHY}")
mx = pytest.importorskip("mlx.core", reason=f"mlx: {_WHY}")
pytest.importorskip("mlx_lm", reason=f"mlx_lm: {_WHY}")

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from kvwire_engines.mlx import MlxCaches  # noqa: E402
from kvwire_engines.transformers import TransformersCaches  # noqa: E402

LENGTHS: Final = (40, 129, 300, 1000)
# Largest differences of a log-probability, whose standard deviation is about 3. With
# flash attention llama.cpp computes in f16, and differs from itself as much.
NEAR: Final = {("f32", "DISABLED"): 3e-3, ("f16", "AUTO"): 0.3}


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_from(model, tmp_path_factory.mktemp("made") / "from")


async def prefilled(
    engine: str, store: BlockStore, folder: Path, prompts: list[list[int]]
) -> None:
    """Let an engine compute prompts, and store them."""
    weights = weights_name(str(folder))
    if engine == "mlx":
        model: Any = load_model(folder)[0]
        kept: Caches = MlxCaches(store, model, weights=weights)
    else:
        torch.set_num_threads(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        kept = TransformersCaches(store, model, weights=weights)
    for prompt in prompts:
        if engine == "mlx":
            cache = make_prompt_cache(model)
            model(mx.array([prompt]), cache=cache)
        else:
            cache = transformers.DynamicCache(config=model.config)
            with torch.inference_mode():
                model(torch.tensor([prompt]), cache=cache)
        assert await kept.put(prompt, cache) == len(prompt) // 16 * 16


def likely(answer: dict[str, Any]) -> dict[int, float]:
    found = answer["completion_probabilities"][0]["top_logprobs"]
    return {one["id"]: one["logprob"] for one in found}


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize(("kind", "flash"), list(NEAR))
async def test_another_engine_prefills_and_llamacpp_decodes(
    *, engine: str, kind: str, flash: str, model: Path, folder: Path, tmp_path: Path
) -> None:
    prompts = [prompt_of(length, length) for length in LENGTHS]
    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        llama_server(model, tmp_path, "--kv", kind, "--flash", flash) as server,
        LlamaCppSessions(
            store,
            server.url,
            server.folder,
            others=[engine],
            made_from=folder,
        ) as sessions,
    ):
        await prefilled(engine, store, folder, prompts)
        for prompt in prompts:
            asked: dict[str, Any] = {"n_probs": 5, "id_slot": 0, "count": 32}
            alone = await server.complete(prompt, cache_prompt=False, **asked)
            await server.complete([97], cache_prompt=False, id_slot=0, count=1)
            known = await sessions.get(0, prompt)
            assert known == (len(prompt) - 1) // 16 * 16
            answer = await server.complete(prompt, **asked)
            assert answer["timings"]["cache_n"] == known
            expected, found = likely(alone), likely(answer)
            both = expected.keys() & found.keys()
            apart = max(abs(expected[one] - found[one]) for one in both)
            print(f"{engine} {kind} {flash}: {len(prompt)} tokens, {apart:.1e}")
            assert apart < NEAR[kind, flash]
            if kind == "f32":
                assert answer["tokens"] == alone["tokens"]


@pytest.mark.parametrize(
    ("others", "kind", "seed", "fields", "said"),
    [
        (["vllm"], "f16", 0, {}, "not known for engine 'vllm'; known are tr"),
        (["transformers"], "q8_0", 0, {}, "q8_0x136 .*; known are f16 and f32"),
        (["transformers"], "f16", 9, {}, "has other values in .*toy.gguf"),
        (["transformers"], "f16", 0, {"rope_theta": 2e4}, "freq_base is 10000.0, and"),
        (["transformers"], "f16", 0, {"rope_type": "linear"}, "rope_type is linear"),
    ],
)
async def test_a_pair_that_is_not_known_is_refused(
    *,
    others: list[str],
    kind: str,
    seed: int,
    fields: dict[str, Any],
    said: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    """Another seed's weights, and rotations of which the GGUF has no trace."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= fields
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    (other / "model.safetensors").symlink_to(folder / "model.safetensors")
    file = toy_model(tmp_path / "toy.gguf", seed)
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        llama_server(file, tmp_path, "--kv", kind) as server,
    ):
        with pytest.raises(UsageError, match=said):
            async with LlamaCppSessions(
                store, server.url, server.folder, others=others, made_from=other
            ) as sessions:
                await sessions.get(0, prompt_of(0, 64))


@pytest.mark.parametrize(
    "key", ["rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"]
)
async def test_a_rotation_that_llamacpp_scales_without_a_type_is_refused(
    key: str, folder: Path, tmp_path: Path
) -> None:
    """Its KV is another one, though the GGUF names no type of scaling."""
    file = toy_model(tmp_path / "toy.gguf", more={key: 4.0})
    why = await refusal(file, folder, tmp_path)
    assert f"{key} is 4.0, and not None" in why


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("config.json", b'{"model_type": "llama"'),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": "gpt2", "n_head": 4}'),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1 oid"),
        ("model.safetensors", (40).to_bytes(8, "little") + b'{"model.norm.weight": {'),
    ],
)
async def test_a_folder_that_is_cut_or_of_another_form_is_refused(
    *, name: str, damaged: bytes, model: Path, folder: Path, tmp_path: Path
) -> None:
    """Twice by the same error: the second time without reading the files."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / name).write_bytes(damaged)
    assert str(other) in await refusal(model, other, tmp_path)


@pytest.mark.parametrize("divided", [False, True])
async def test_files_beside_those_of_the_model_are_not_compared(
    *, divided: bool, model: Path, folder: Path, tmp_path: Path
) -> None:
    """Such as the same weights under the names of another format."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    whole = other / "model.safetensors"
    shutil.copy(whole, other / "consolidated.safetensors")
    (other / "adapter.safetensors").write_bytes(b"of another form")
    if divided:
        size = int.from_bytes(whole.read_bytes()[:8], "little")
        header = json.loads(whole.read_bytes()[8 : 8 + size])
        part = "model-00001-of-00001.safetensors"
        names = {name: part for name in header if name != "__metadata__"}
        whole.rename(other / part)
        index = other / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        llama_server(model, tmp_path, "--kv", "f16") as server,
        LlamaCppSessions(
            store,
            server.url,
            server.folder,
            others=["transformers"],
            made_from=other,
        ) as sessions,
    ):
        prompt = prompt_of(0, 64)
        await prefilled("transformers", store, other, [prompt])
        assert await sessions.get(0, prompt) == 48


async def refusal(file: Path, folder: Path, at: Path) -> str:
    """Why a server's sessions refuse what transformers has stored for a folder."""
    why = []
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        llama_server(file, at, "--kv", "f16") as server,
        LlamaCppSessions(
            store,
            server.url,
            server.folder,
            others=["transformers"],
            made_from=folder,
        ) as sessions,
    ):
        for _ in range(2):
            with pytest.raises(UsageError) as refused:
                await sessions.get(0, prompt_of(0, 64))
            why.append(str(refused.value))
    assert why[0] == why[1]
    return why[0]


async def test_a_folder_has_to_be_named_and_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    """Weights with a name of their own may be others than those of the folder."""
    at = ("http://127.0.0.1:1", tmp_path)
    async with BlockStore.open(["memory:1MiB"]) as store:
        with pytest.raises(UsageError, match=r"made_from=.* no config.json"):
            LlamaCppSessions(store, *at, others=["mlx"], made_from=tmp_path)
        with pytest.raises(UsageError, match="leave one of the two out"):
            LlamaCppSessions(
                store, *at, others=["mlx"], made_from=folder, weights="mine"
            )
