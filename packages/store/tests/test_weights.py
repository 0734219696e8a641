"""Names of weights: equal for the same tensors, and for no others."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvwire.errors import UsageError
from kvwire_store.weights import weights_name

Tensors = dict[str, npt.NDArray[np.float32]]
MIB = 1 << 20


def tensors(seed: int = 0, layers: int = 3) -> Tensors:
    chance = np.random.default_rng(seed)
    return {
        f"model.layers.{layer}.{part}.weight": chance.random((64, 96), np.float32)
        for layer in range(layers)
        for part in ("q", "k", "v")
    }


def write(path: Path, what: Tensors, **metadata: str) -> None:
    """A file in the format of safetensors."""
    header, at = {"__metadata__": metadata}, 0
    entries: dict[str, object] = dict(header)
    for name, tensor in what.items():
        entries[name] = {
            "dtype": "F32",
            "shape": tensor.shape,
            "data_offsets": [at, at := at + tensor.nbytes],
        }
    text = json.dumps(entries).encode()
    data = b"".join(tensor.tobytes() for tensor in what.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def name_of(folder: Path, what: Tensors, **metadata: str) -> str:
    write(folder / "model.safetensors", what, **metadata)
    return weights_name(str(folder))


def test_the_same_tensors_have_one_name_wherever_they_are(tmp_path: Path) -> None:
    one = name_of(tmp_path / "a", tensors())
    assert len(one) == 32
    assert name_of(tmp_path / "b", tensors(), made_by="another") == one
    # The same, divided among files in another order, beside what is none of them.
    listed = list(tensors().items())[::-1]
    folder = tmp_path / "c"
    write(folder / "model-1.safetensors", dict(listed[:4]))
    write(folder / "model-2.safetensors", dict(listed[4:]))
    write(folder / "old.safetensors", tensors(7))
    (folder / "training_args.bin").write_bytes(b"x")
    names = {
        name: f"model-{1 + (at > 3)}.safetensors" for at, (name, _) in enumerate(listed)
    }
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert weights_name(str(folder)) == one


def test_a_tune_of_one_tensor_has_another_name(tmp_path: Path) -> None:
    first = name_of(tmp_path / "a", tensors())
    names = {first}
    for number, name in enumerate(tensors()):
        tuned = tensors()
        tuned[name] *= 1.001
        names.add(name_of(tmp_path / str(number), tuned))
    assert len(names) == 1 + len(tensors())
    swapped = dict(zip(tensors(), list(tensors().values())[::-1], strict=True))
    names |= {
        name_of(tmp_path / "swapped", swapped),
        name_of(tmp_path / "more", tensors(layers=4)),
        name_of(tmp_path / "other", tensors(1)),
    }
    assert len(names) == 4 + len(tensors())


def test_a_change_at_either_end_of_a_large_tensor_is_seen(tmp_path: Path) -> None:
    names, large = set(), np.zeros(40 * MIB // 4, np.float32)
    for at in (None, 0, -1, len(large) // 2):
        if at is not None:
            large[at] = 1.0
        names.add(name_of(tmp_path, {"w": large}))
    # What is in the middle of 40 MiB may be in no sample.
    assert len(names) >= 3


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.gguf", "consolidated.pth"]
)
def test_files_that_nobody_looks_into(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"weights" * 10_000)
    one = weights_name(str(tmp_path))
    path.write_bytes(b"weights" * 9_999 + b"Weights")
    os.utime(path, ns=(1, 1))
    assert weights_name(str(tmp_path)) != one
    if name.endswith("gguf"):
        # One file may be all that an engine is given.
        assert weights_name(str(path)) == weights_name(str(tmp_path))


def test_an_adapter_is_its_weights_and_how_much_they_count(tmp_path: Path) -> None:
    write(tmp_path / "adapter_model.safetensors", tensors())
    config = tmp_path / "adapter_config.json"
    names = set()
    for number, alpha in enumerate((8, 16)):
        config.write_text(json.dumps({"lora_alpha": alpha}))
        os.utime(config, ns=(number, number))
        names.add(weights_name(str(tmp_path)))
    assert len(names) == 2


def test_little_is_read_of_a_large_model(tmp_path: Path) -> None:
    """100 GB in 700 tensors; as it is sparse, the test takes no room."""
    each, count = 150 * MIB, 700
    entries = {
        f"model.layers.{at}.weight": {
            "dtype": "BF16",
            "shape": [each // 2],
            "data_offsets": [at * each, (at + 1) * each],
        }
        for at in range(count)
    }
    text = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + each * count)
    before = read_by_this_process()
    one = weights_name(str(tmp_path))
    if before is not None:
        after = read_by_this_process()
        assert after is not None
        assert after - before < 64 * MIB
    with path.open("r+b") as file:
        file.seek(8 + len(text) + each)
        file.write(b"tuned")
    assert weights_name(str(tmp_path)) != one


def read_by_this_process() -> int | None:
    """Bytes that it has asked the kernel for; None where nobody counts them."""
    counts = Path("/proc/self/io")
    if not counts.exists():
        return None
    lines = dict(line.split(": ") for line in counts.read_text().splitlines())
    return int(lines["rchar"])


def test_a_repository_that_was_downloaded(tmp_path: Path) -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        pytest.skip("huggingface_hub is not installed here; `make test-vllm` does")
    repository = tmp_path / "models--org--model"
    cache = str(tmp_path)
    (repository / "refs").mkdir(parents=True)
    for revision in ("a" * 40, "b" * 40):
        snapshot = repository / "snapshots" / revision
        write(snapshot / "model.safetensors", tensors(len(revision) + ord(revision[0])))
        (repository / "refs" / "main").write_text(revision)
        if revision[0] == "a":
            only = weights_name("org/model", cache=cache)
    one, main = (
        weights_name("org/model", revision=revision, cache=cache)
        for revision in ("a" * 40, "main")
    )
    assert only == one != main
    with pytest.raises(UsageError, match="2 of its revisions are on this host"):
        weights_name("org/model", cache=cache)


def test_what_cannot_be_named_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="found no weights among its files on this host"
    ):
        weights_name(str(tmp_path))
    for text, said in (
        (b"\xff" * 20, "no safetensors header"),
        (b"\2\0\0\0\0\0\0\0[]", ""),
    ):
        (tmp_path / "model.safetensors").write_bytes(text)
        with pytest.raises(UsageError, match=f"its weights: .*{said}"):
            weights_name(str(tmp_path))
    for model in ("no-such/model", ""):
        with pytest.raises(UsageError, match="neither a path nor a repository"):
            weights_name(model)
