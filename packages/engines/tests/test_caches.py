"""A cache of transformers or MLX is kept, moved and continued in one call each.

Needs torch, transformers and mlx_lm; `make test-torch` installs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

_WHY: Final = "not installed here; `make test-torch` installs it"
torch = pytest.importorskip("torch", reason=f"torch: {_WHY}")
transformers = pytest.importorskip("transformers", reason=f"transformers: {_WHY}")
mx = pytest.importorskip("mlx.core", reason=f"mlx: {_WHY}")
pytest.importorskip("mlx_lm", reason=f"mlx_lm: {_WHY}")

from mlx_lm.models.cache import (  # noqa: E402
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import load_model  # noqa: E402

import kvwire  # noqa: E402
from kvwire import PagedCache  # noqa: E402
from kvwire.errors import UsageError  # noqa: E402
from kvwire.kv.hashing import HashScheme  # noqa: E402
from kvwire.kv.layout import AxisOrder  # noqa: E402
from kvwire_engines.caches import Caches  # noqa: E402
from kvwire_engines.mlx import MlxCaches  # noqa: E402
from kvwire_engines.transformers import TransformersCaches  # noqa: E402
from kvwire_store import BlockStore  # noqa: E402
from kvwire_store.conventions import (  # noqa: E402
    MODELS,
    ROTATIONS,
    meaning_of,
    rotates_so,
)
from kvwire_store.weights import weights_name  # noqa: E402

# It would leave a thread behind.
transformers.utils.logging.disable_progress_bar()

LAYERS: Final = 3
VOCABULARY: Final = 96
PROMPT: Final = [number * 37 % VOCABULARY for number in range(53)]


class Engine:
    """One engine's model, and what the tests ask of both."""

    kept: type[Caches]
    model: Any

    def cache(self, kind: str = "plain") -> Any:
        raise NotImplementedError

    def logits(self, tokens: list[int], cache: Any) -> Any:
        """Compute tokens behind a cache; return the last one's logits."""
        raise NotImplementedError

    def answer(
        self, tokens: list[int], cache: Any, known: int, count: int
    ) -> list[int]:
        """Return greedy tokens; a cache with `known` tokens gets the rest."""
        answer: list[int] = []
        fresh = tokens[known:]
        for _ in range(count):
            answer.append(int(self.logits(fresh, cache).argmax()))
            fresh = answer[-1:]
        return answer


class Transformers(Engine):
    kept = TransformersCaches

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def cache(self, kind: str = "plain") -> Any:
        config = self.model.config
        if kind == "static":
            return transformers.StaticCache(config=config, max_cache_len=160)
        if kind == "fp8":
            return transformers.QuantizedCache("fp8", config)
        return transformers.DynamicCache(config=config)

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is not typed
    def logits(self, tokens: list[int], cache: Any) -> Any:
        return self.model(torch.tensor([tokens]), cache=cache).logits[0, -1]


class Mlx(Engine):
    kept = MlxCaches

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)[0]

    def cache(self, kind: str = "plain") -> Any:
        if kind == "quantised":
            return [QuantizedKVCache(group_size=32, bits=8) for _ in range(LAYERS)]
        if kind == "rotating":
            return [RotatingKVCache(max_size=64) for _ in range(LAYERS)]
        return make_prompt_cache(self.model)

    def logits(self, tokens: list[int], cache: Any) -> Any:
        return self.model(mx.array([tokens]), cache=cache)[0, -1]


ENGINES: Final = {"transformers": Transformers, "mlx": Mlx}
every_engine = pytest.mark.parametrize("engine", list(ENGINES))


def saved(folder: Path, kind: str = "llama", **fields: Any) -> Path:
    """Save a model whose random weights make each token depend on all of the KV."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        **fields,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine_of(folder: Path) -> Callable[[str], Engine]:
    """Each engine with the model's weights, loaded once."""
    loaded: dict[str, Engine] = {}

    def engine(name: str) -> Engine:
        if name not in loaded:
            loaded[name] = ENGINES[name](folder)
        return loaded[name]

    return engine


async def moved(engine: Engine, source: Any, target: Any, length: int = 53) -> int:
    """Put one cache of a prompt, and get it into another."""
    async with BlockStore.open(["memory:1MiB"]) as store:
        kept = engine.kept(store, engine.model, weights="w")
        await kept.put(PROMPT[:length], source)
        return await kept.get(PROMPT[:length], target)


@every_engine
async def test_a_prompt_goes_on_in_another_cache(
    engine_of: Callable[[str], Engine], folder: Path, engine: str
) -> None:
    """Three full blocks of its 53 tokens are known; the answer stays the same."""
    here = engine_of(engine)
    first = here.cache()
    expected = here.answer(PROMPT, first, 0, 24)
    async with BlockStore.open(["memory:1MiB"]) as store:
        kept = here.kept(store, here.model, weights=weights_name(str(folder)))
        assert await kept.get(PROMPT, here.cache()) == 0
        # The last token of the answer was never computed.
        assert await kept.put([*PROMPT, *expected], first) == 64
        second = here.cache()
        assert await kept.get(PROMPT, second) == 48
        assert here.answer(PROMPT, second, 48, 24) == expected
        # Another prompt with the same first 20 tokens shares one block.
        other = [*PROMPT[:20], *reversed(PROMPT)]
        third = here.cache()
        assert await kept.get(other, third) == 16
        found = here.answer(other, third, 16, 24)
        assert found == here.answer(other, here.cache(), 0, 24)
        renamed = here.kept(store, here.model, weights="others")
        assert await renamed.get(PROMPT, here.cache()) == 0


@every_engine
async def test_what_is_restored_decides_the_tokens(
    engine_of: Callable[[str], Engine], engine: str
) -> None:
    """With another prompt's KV the answer is another: equal answers mean equal KV."""
    here = engine_of(engine)
    expected = here.answer(PROMPT, here.cache(), 0, 24)
    wrong = here.cache()
    here.logits(PROMPT[1:49], wrong)
    assert here.answer(PROMPT, wrong, 48, 24) != expected


@pytest.mark.parametrize(
    ("engine", "source", "target"),
    [
        ("transformers", "static", "plain"),
        ("transformers", "plain", "static"),
        ("mlx", "quantised", "quantised"),
        ("mlx", "rotating", "plain"),
        ("mlx", "plain", "rotating"),
    ],
)
async def test_between_kinds_of_caches(
    *, engine_of: Callable[[str], Engine], engine: str, source: str, target: str
) -> None:
    here = engine_of(engine)
    first = here.cache(source)
    expected = here.answer(PROMPT, first, 0, 1)
    second = here.cache(target)
    assert await moved(here, first, second) == 48
    assert here.answer(PROMPT, second, 48, 1) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("engine", "kind"),
    [("transformers", "plain"), ("mlx", "plain"), ("mlx", "quantised")],
)
async def test_elements_of_16_bits(
    *, folder: Path, engine: str, kind: str, dtype: str
) -> None:
    """NumPy has no name for one of them; the bytes are those that were computed."""
    here = ENGINES[engine](folder)
    if engine == "mlx":
        here.model.set_dtype(getattr(mx, dtype))
    else:
        here.model.to(getattr(torch, dtype))
    first, second = here.cache(kind), here.cache(kind)
    here.logits(PROMPT[:48], first)
    assert await moved(here, first, second, 49) == 48
    assert here.answer(PROMPT, second, 48, 24) == here.answer(PROMPT, first, 48, 24)


async def test_a_quantised_cache_is_filled_as_by_a_prefill(
    engine_of: Callable[[str], Engine],
) -> None:
    """Its numbers depend on what is computed in one pass, which a store cannot know."""
    here = engine_of("transformers")
    first, second, prefilled = here.cache(), here.cache("fp8"), here.cache("fp8")
    here.logits(PROMPT[:48], prefilled)
    here.logits(PROMPT, first)
    assert await moved(here, first, second) == 48
    assert here.answer(PROMPT, second, 48, 24) == here.answer(PROMPT, prefilled, 48, 24)


@every_engine
async def test_a_prompt_moves_to_another_process(
    engine_of: Callable[[str], Engine], engine: str
) -> None:
    here = engine_of(engine)
    first, second = here.cache(), here.cache()
    expected = here.answer(PROMPT, first, 0, 24)
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        kvwire.open() as prefill,
        kvwire.open() as decode,
    ):
        kept = here.kept(store, here.model, weights="w")
        connection = await decode.connect(await prefill.listen("127.0.0.1:0"))
        out = kept.publish(prefill, "r", PROMPT, first)
        outcome = await kept.pull(connection, "r", PROMPT, second)
        assert outcome.usable_tokens == 48
        await out.drained()
        assert here.answer(PROMPT, second, 48, 24) == expected
        other = here.kept(store, here.model, weights="others")
        out = kept.publish(prefill, "s", PROMPT, first)
        refused = await other.pull(connection, "s", PROMPT, here.cache())
        assert refused.usable_tokens == 0
        assert "fingerprint" in str(refused.missing.reasons)
        out.abort()
        await out.drained()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda here: here.cache("fp8"), "Fp8QuantizedLayer cannot be read"),
        (lambda here: transformers.DynamicCache(), "tokens has 3"),
    ],
)
async def test_transformers_refuses(
    engine_of: Callable[[str], Engine], make: Any, said: str
) -> None:
    here = engine_of("transformers")
    cache = make(here)
    here.logits(PROMPT, cache)
    with pytest.raises(UsageError, match=said):
        await moved(here, cache, here.cache(), 3)
    with pytest.raises(UsageError, match="not empty"):
        await moved(here, here.cache(), cache)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda here: [ArraysCache(2) for _ in range(LAYERS)], "ArraysCache is not"),
        (lambda here: [KVCache(), KVCache(), QuantizedKVCache()], "in another way"),
    ],
)
async def test_mlx_refuses(
    engine_of: Callable[[str], Engine], make: Any, said: str
) -> None:
    here = engine_of("mlx")
    cache = make(here)
    with pytest.raises(UsageError, match=said):
        await moved(here, cache, cache)


def windowed(engine: str, folder: Path) -> Engine:
    """A model, or a cache, that drops tokens before a window."""
    if engine == "transformers":
        return Transformers(saved(folder, "mistral", sliding_window=20))
    return Mlx(saved(folder))


@every_engine
@pytest.mark.parametrize("step", [40, 7, 1])
async def test_behind_a_window_a_state_is_kept_whole(
    tmp_path: Path, engine: str, step: int
) -> None:
    """It goes on from its last token only, whatever the steps that led there."""
    here = windowed(engine, tmp_path)
    prompt = PROMPT + PROMPT[::-1]
    first = here.cache("rotating")
    for at in range(0, 90, step):
        here.logits(prompt[at : min(90, at + step)], first)
    async with BlockStore.open(["memory:8MiB"]) as store:
        kept = here.kept(store, here.model, weights="w")
        assert await kept.put(prompt[:90], first) == 90
        expected = here.answer(prompt, first, 90, 24)
        second = here.cache("rotating")
        assert await kept.get(prompt, second) == 90
        assert here.answer(prompt, second, 90, 24) == expected
        assert await kept.get(prompt[:90], here.cache("rotating")) == 0
        assert await kept.get([*prompt[:89], 3, 4], here.cache("rotating")) == 0
        async with kvwire.open() as comm:
            with pytest.raises(UsageError, match="has dropped tokens"):
                kept.publish(comm, "r", prompt, first)


async def test_a_state_of_another_window_is_not_used(tmp_path: Path) -> None:
    here = Mlx(saved(tmp_path))
    first = here.cache("rotating")
    here.answer(PROMPT, first, 0, 38)
    async with BlockStore.open(["memory:8MiB"]) as store:
        kept = here.kept(store, here.model, weights="w")
        tokens = [*PROMPT, *PROMPT[:37]]
        assert await kept.put(tokens, first) == 90
        larger = [RotatingKVCache(max_size=80) for _ in range(LAYERS)]
        assert await kept.get([*tokens, 1], larger) == 0
        assert await kept.get([*tokens, 1], here.cache("rotating")) == 90


ROTATED: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


def rotated(folder: Path, kind: str, rotation: str) -> Path:
    """Save a model with a rotation, in the form of config.json that MLX reads too."""
    fields = {"rope_type": rotation, "rope_theta": 20_000.0, **ROTATED[rotation]}
    saved(folder, kind, rope_parameters=fields, sliding_window=None)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    fields = config.pop("rope_parameters")
    config["rope_theta"] = fields.pop("rope_theta")
    config["rope_scaling"] = fields
    file.write_text(json.dumps(config))
    return folder


async def taken(folder: Path, source: str, target: str) -> tuple[Engine, Any, Any]:
    """Let one engine prefill and another take its KV; return what each has."""
    first, second = ENGINES[source](folder), ENGINES[target](folder)
    prefilled, cache = first.cache(), second.cache()
    first.logits(PROMPT, prefilled)
    weights = weights_name(str(folder))
    async with BlockStore.open(["memory:1MiB"]) as store:
        prefill = first.kept(store, first.model, weights=weights)
        await prefill.put(PROMPT, prefilled)
        alone = second.kept(store, second.model, weights=weights)
        assert await alone.get(PROMPT, cache) == 0
        kept = second.kept(store, second.model, weights=weights, others=[source])
        return second, cache, await kept.get(PROMPT, cache)


@pytest.mark.parametrize("target", list(ENGINES))
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kind", MODELS)
async def test_one_engine_prefills_another_decodes(
    *, tmp_path: Path, kind: str, rotation: str, target: str
) -> None:
    """The same tokens, and logits that differ as between steps of different lengths."""
    (source,) = set(ENGINES) - {target}
    here, cache, known = await taken(rotated(tmp_path, kind, rotation), source, target)
    assert known == 48
    mine = here.cache()
    expected = here.answer(PROMPT, mine, 0, 24)
    assert here.answer(PROMPT, cache, 48, 24) == expected
    last = here.logits([5], cache) - here.logits([5], mine)
    assert float(abs(last).max()) < 1e-4


def test_what_differs_between_engines_is_the_rotation(tmp_path: Path) -> None:
    """Each computes its angles in float32; with exact ones their logits are closer."""
    folder = rotated(tmp_path, "llama", "default")
    one, other = Transformers(folder), Mlx(folder)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 2000).tolist()

    def difference() -> float:
        found = np.array(other.logits(tokens, other.cache()))
        return float(abs(one.logits(tokens, one.cache()).numpy() - found).max())

    def angles(positions: Any) -> Any:
        """Return cosines and sines of positions, in float64."""
        turns = positions[:, None] * 20_000.0 ** (-np.arange(0, 32, 2) / 32)
        turns = np.concatenate((turns, turns), axis=-1)
        return np.cos(turns), np.sin(turns)

    def embedded(_: Any, position_ids: Any) -> Any:
        both = angles(position_ids[0].numpy())
        return tuple(torch.tensor(part[None], dtype=torch.float32) for part in both)

    def exact(heads: Any, offset: int = 0) -> Any:
        both = angles(np.arange(offset, offset + heads.shape[-2]))
        cos, sin = (mx.array(part.astype(np.float32)) for part in both)
        first, second = mx.split(heads, 2, axis=-1)
        return heads * cos + mx.concatenate((-second, first), axis=-1) * sin

    apart = difference()
    one.model.model.rotary_emb.forward = embedded
    for layer in other.model.layers:
        layer.self_attn.rope = exact
    closer = difference()
    print(f"largest difference of a logit: {apart:.1e}, with exact angles {closer:.1e}")
    assert closer < apart / 2


@every_engine
@pytest.mark.parametrize("kernel", ["vec", "amx"])
async def test_blocks_of_vllm_go_on(
    *, engine_of: Callable[[str], Engine], engine: str, kernel: str
) -> None:
    """Blocks packed as vLLM's kernels do; test_vllm.py compares these with a kernel."""
    here, other = engine_of(engine), engine_of("transformers")
    computed = other.cache()
    other.logits(PROMPT, computed)
    packed = [
        torch.cat([pack(one, kernel, part) for part, one in enumerate(pair)], dim=-1)
        for pair in ((layer.keys, layer.values) for layer in computed.layers)
    ]
    async with BlockStore.open(["memory:1MiB"]) as store:
        kept = here.kept(store, here.model, weights="w", others=["vllm"])
        (source,) = (
            one
            for one in kept.sources
            if one.name.endswith(f"cpu_attn {kernel} with blocks of 16")
        )
        spec = source.spec(kept.shape)
        blocks = PagedCache(
            spec,
            [one.view(3, 1, 16, 64).contiguous() for one in packed],
            AxisOrder("block head token (kv dim)"),
        )
        hashes = HashScheme(16).block_hashes(PROMPT)
        assert (await store.put(hashes, blocks, [0, 1, 2])).complete
        cache = here.cache()
        assert await kept.get(PROMPT, cache) == 48
        expected = here.answer(PROMPT, here.cache(), 0, 24)
        assert here.answer(PROMPT, cache, 48, 24) == expected


def pack(rows: Any, kernel: str, part: int) -> Any:
    """Return keys (part 0) or values of three blocks as a kernel keeps them."""
    tokens = rows[0, 0, :48].view(3, 16, 32)
    if kernel == "vec":
        return (tokens if part else tokens.transpose(1, 2)).reshape(3, -1)
    if part:
        tiles = tokens.view(3, 8, 2, 2, 16)
        return tiles.permute(0, 3, 1, 4, 2).reshape(3, -1)
    tiles = tokens.view(3, 1, 16, 16, 2)
    return tiles.permute(0, 1, 3, 2, 4).reshape(3, -1)


async def test_a_rotation_that_the_other_engine_ignores(tmp_path: Path) -> None:
    """mlx_lm does not read rope_parameters of a Llama: its keys are others."""
    fields = {"rope_type": "llama3", "rope_theta": 20_000.0, **ROTATED["llama3"]}
    saved(tmp_path, rope_parameters=fields)
    _, _, known = await taken(tmp_path, "mlx", "transformers")
    assert known == 0


@pytest.mark.parametrize(
    ("kind", "rotation", "fields", "source", "said"),
    [
        ("llama", "default", {}, "llama.cpp", "engine 'llama.cpp'; known are mlx"),
        ("llama", "yarn", {}, "mlx", "rope_type 'yarn'; known are default"),
        ("phi3", "default", {"pad_token_id": 0}, "mlx", "model_type 'phi3'"),
        ("mistral", "default", {"sliding_window": 64}, "mlx", "a window of 64 tokens"),
    ],
)
async def test_a_pair_that_is_not_known_is_refused(
    *, tmp_path: Path, kind: str, rotation: str, fields: Any, source: str, said: str
) -> None:
    rope = {"rope_type": rotation, "rope_theta": 20_000.0, **ROTATED[rotation]}
    here = Transformers(saved(tmp_path, kind, rope_parameters=rope, **fields))
    async with BlockStore.open(["memory:1MiB"]) as store:
        with pytest.raises(UsageError, match=said):
            here.kept(store, here.model, weights="w", others=[source])


def test_a_model_that_rotates_otherwise_than_its_config_says(
    engine_of: Callable[[str], Engine],
) -> None:
    """Every way that a rotation can be another one shows in its angles."""
    config = engine_of("transformers").model.config
    meaning = meaning_of(config, {"rope_theta": 10_000.0}, None)

    def turned(dims: int, base: float, pairs: bool) -> Any:
        rope = mx.fast.rope
        return lambda position: rope(
            mx.ones((1, 1, 1, dims)),
            32,
            traditional=pairs,
            base=base,
            scale=1.0,
            offset=position,
        )[0, 0, 0]

    assert rotates_so(meaning, turned(32, 10_000.0, False), 32)
    assert not rotates_so(meaning, turned(32, 10_000.0, True), 32)
    assert not rotates_so(meaning, turned(32, 10_100.0, False), 32)
    assert not rotates_so(meaning, turned(64, 10_000.0, False), 32)
