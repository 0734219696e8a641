"""What an engine says of its weights, its draft model and its attention kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvwire.errors import UsageError
from kvwire_store.weights import weights_name
from kvwire_vllm.identity import (
    block_order,
    draft_name,
    identity_of,
    model_digest,
    model_weights,
    portable_name,
)

TARGET = SimpleNamespace()
EAGLE = SimpleNamespace(architectures=["Eagle"], seed=3)
DUMMY = SimpleNamespace(load_format="dummy")


@pytest.mark.parametrize(
    ("speculative", "name"),
    [
        (None, "none"),
        # Prompts that are looked up in themselves.
        ({"draft_model_config": TARGET, "target_model_config": TARGET}, "none"),
        ({"draft_model_config": None}, "none"),
        (
            {"draft_model_config": EAGLE, "method": "eagle"},
            "eagle of Eagle, dummy weights of seed 3",
        ),
    ],
)
def test_the_draft_model_has_a_name(
    speculative: dict[str, Any] | None, name: str
) -> None:
    said = SimpleNamespace(**speculative) if speculative else None
    config = SimpleNamespace(speculative_config=said, load_config=DUMMY)
    assert draft_name(config, "") == name
    assert draft_name(config, "mine") == name.partition(",")[0]


def test_a_model_is_the_same_wherever_its_files_lie() -> None:
    def digest(revision: str | None, path: str, layers: int = 2) -> str:
        text = {"layers": layers, "_name_or_path": path}
        said = {"_commit_hash": revision, "text_config": text, "parts": [text]}
        model = SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: said),
            revision=revision,
            quantization=None,
        )
        cache = SimpleNamespace(cache_dtype="auto")
        return model_digest(SimpleNamespace(model_config=model, cache_config=cache))

    assert digest(None, "/models/a") == digest("abc", "org/a")
    assert digest(None, "", layers=3) != digest(None, "")


def weights(seed: int = 0, **said: Any) -> SimpleNamespace:
    model = SimpleNamespace(**{"seed": seed, "revision": None, "model": ""} | said)
    load = SimpleNamespace(load_format=said.get("load", "dummy"), download_dir=None)
    return SimpleNamespace(model_config=model, load_config=load)


def test_of_random_weights_the_seed_counts() -> None:
    named = [model_weights(weights(seed), "") for seed in (0, 0, 1)]
    assert named[0] == named[1] != named[2]
    assert model_weights(weights(1), "mine") == model_weights(weights(0), "mine")


def test_weights_are_named_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    said = weights(load="auto", model=str(tmp_path))
    assert model_weights(said, "") == weights_name(str(tmp_path))
    # Where they are streamed from elsewhere only the config is here.
    said.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(UsageError, match=r's3://bucket/model.*: set "fingerprint"'):
        model_weights(said, "")
    assert model_weights(said, "mine") == "mine"


def test_an_adapter_is_what_is_in_its_files(tmp_path: Path) -> None:
    def identity(path: Path, name: str = "a") -> bytes:
        adapter = SimpleNamespace(lora_name=name, lora_path=str(path))
        return identity_of(SimpleNamespace(lora_request=adapter))

    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, content in zip(folders, (b"one", b"one", b"two"), strict=True):
        folder.mkdir()
        (folder / "adapter_model.bin").write_bytes(content)
    one, copy, tuned = map(identity, folders)
    assert one == copy != tuned
    assert identity(folders[0], "another") != one
    assert identity(tmp_path / "gone") != identity(tmp_path / "went")
    # It is loaded again from the same place.
    (folders[0] / "adapter_model.bin").write_bytes(b"three")
    assert identity(folders[0]) != one


@pytest.mark.parametrize(
    ("module", "order"),
    [
        ("vllm.v1.attention.backends.flash_attn", "whole tokens"),
        ("vllm.v1.attention.backends.mla.triton_mla", "whole tokens"),
        # Its keys have the token as the last axis, or lie in tiles.
        ("vllm.v1.attention.backends.cpu_attn", "cpu_attn with blocks of 16"),
        ("somebody.else", "else with blocks of 16"),
        (None, "unknown with blocks of 16"),
    ],
)
def test_blocks_are_only_cut_where_the_kernel_is_known(
    module: str | None, order: str
) -> None:
    """Two of them that are not by token have to be the same."""
    backend = type("Backend", (), {"__module__": module})
    layer = SimpleNamespace(get_attn_backend=lambda: backend) if module else None
    spec, state = SimpleNamespace(block_size=16), SimpleNamespace(shapes=[(2,)])
    groups = [
        SimpleNamespace(kv_cache_spec=state, layer_names=["s"]),
        SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]),
    ]
    layers = {"a": layer, "b": layer}
    said = SimpleNamespace(static_forward_context=layers)
    config = SimpleNamespace(compilation_config=said)
    assert block_order(config, SimpleNamespace(kv_cache_groups=groups)) == order


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3'; known are llama"),
        ({"rope": "yarn"}, "rope_type 'yarn'; known are default"),
        ({"window": 64}, "a window of 64 tokens"),
        ({"quantization": "awq"}, "quantization is awq"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype is fp8"),
        ({"ranks": 2}, "ranks is 2; only 1"),
    ],
)
def test_a_portable_name_is_for_what_other_engines_know(
    changes: dict[str, Any], said: str
) -> None:
    assert portable_name(_portable({}), "w").startswith("w vllm ")
    with pytest.raises(UsageError, match=said):
        portable_name(_portable(changes), "w")


def _portable(changes: dict[str, Any]) -> Any:
    config = SimpleNamespace(
        model_type=changes.get("model_type", "llama"),
        rope_parameters={
            "rope_type": changes.get("rope", "default"),
            "rope_theta": 1e4,
        },
        sliding_window=changes.get("window"),
        rms_norm_eps=1e-6,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=config, quantization=changes.get("quantization")
        ),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        parallel_config=SimpleNamespace(tensor_parallel_size=changes.get("ranks", 1)),
        load_config=DUMMY,
    )
