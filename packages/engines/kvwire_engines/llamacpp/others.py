"""KV of other engines as rows of a slot file: for a GGUF of the same weights.

Nothing in a GGUF names its source. So it is compared with the folder that it was made
from: samples of each tensor's values, and the rotation of keys. If they are equal,
other engines' KV for that folder fits the GGUF, in another order: the conversion has
moved rows n and n + width / 2 of a head of ``q_proj`` and ``k_proj`` to 2n and 2n + 1,
and the elements of keys with them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvwire import PagedCache
from kvwire.errors import UsageError, error_text, shown
from kvwire.extras import needed_by
from kvwire_engines.llamacpp.slot_file import Rows, SlotForm
from kvwire_engines.sources import Shape, Source
from kvwire_store.conventions import Meaning, meaning_of, require_known
from kvwire_store.weights import weights_name

OTHERS: Final = ("transformers", "mlx")
"""The engines whose KV llama.cpp has been tested with."""
OTHERS_TOKENS: Final = 16
"""Tokens of a block of theirs, unless a program names another number."""
# ``ggml_type`` of a slot's rows: by which of the other engine's elements they are made.
_ELEMENTS: Final[Mapping[int, tuple[str, ...]]] = {
    0: ("float32",),
    1: ("float32", "float16"),
}
_DTYPES: Final[Mapping[int, npt.DTypeLike]] = {0: np.float32, 1: np.float16}
# Types of tensors, in GGUF and in safetensors, whose values are exact.
_GGUF: Final = {0: "<f4", 1: "<f2", 30: "<u2"}
_SAFETENSORS: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# The keys of a GGUF for a rotation that scales nothing.
_ROTATION: Final = frozenset({"llama.rope.dimension_count", "llama.rope.freq_base"})
# How files fail that are cut, or of another form.
_UNREADABLE: Final = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
# Rows of a tensor that are compared: training changes most of them.
_SAMPLES: Final = 16


class SlotBlocks(NamedTuple):
    """Blocks that a slot may be restored from.

    Attributes:
        block_tokens: Tokens of each.
        landing: Returns memory for that many blocks, and a function that returns
            their rows once they have landed.
    """

    block_tokens: int
    landing: Callable[[int], tuple[PagedCache, Callable[[], Rows]]]


class OtherEngines:
    """KV that other engines have stored for the folder behind a GGUF.

    Args:
        engines: Some of :data:`OTHERS`.
        folder: The folder, with ``config.json`` and safetensors.

    Attributes:
        engines: The engines.

    Raises:
        UsageError: An engine is not known, or the folder has no model.
    """

    def __init__(self, engines: Sequence[str], folder: str | Path) -> None:
        for engine in engines:
            if engine not in OTHERS:
                raise UsageError(
                    f"KV of {engine} in llama.cpp: not known for engine {engine!r}; "
                    f"known are {', '.join(OTHERS)}"
                )
        self.engines: tuple[str, ...] = tuple(engines)
        self._folder = Path(folder)
        if engines and not (self._folder / "config.json").is_file():
            raise UsageError(
                f"made_from={shown(str(folder))}: no config.json is there; pass the "
                "folder of Hugging Face's files that the GGUF was made from"
            )
        # A file's header may take seconds to read, so each is read once, by one thread.
        self._lock = threading.Lock()
        # Blocks, or why there are none. bounded: the models that one server loads
        self._known: dict[tuple[str, str], list[SlotBlocks] | str] = {}

    def blocks(self, file: str, form: SlotForm) -> list[SlotBlocks]:
        """Return the kinds of blocks that fit these slots; this reads both models.

        Args:
            file: The GGUF.
            form: The form of its server's slots.

        Raises:
            UsageError: The two have different weights, or it is not known what the
                other engines' KV means here.
        """
        key = file, form.name
        with self._lock:
            if key not in self._known:
                try:
                    self._known[key] = self._blocks(Path(file), form)
                except UsageError as exc:
                    self._known[key] = str(exc)
            found = self._known[key]
        if isinstance(found, str):
            raise UsageError(found)
        return found

    def _blocks(self, file: Path, form: SlotForm) -> list[SlotBlocks]:
        where = f"KV of {', '.join(self.engines)} in llama.cpp"
        try:
            meaning, heads, width = _compared(where, file, self._folder)
        except UsageError:
            raise
        except _UNREADABLE as exc:
            raise UsageError(
                f"{where}: cannot compare {file} with {self._folder}: {error_text(exc)}"
            ) from None
        for engine in self.engines:
            require_known(where, engine, meaning)
        if form.key[0] not in _ELEMENTS or form.value[0] != form.key[0]:
            raise UsageError(
                f"{where}: the slots are {form.name}; known are f16 and f32, the same "
                "for keys and values"
            )
        row_bytes = heads * width * np.dtype(_DTYPES[form.key[0]]).itemsize
        if (form.key[1], form.value[1], form.rotations) != (
            row_bytes,
            row_bytes,
            (0, 0),
        ):
            raise UsageError(f"{where}: slots of another form: {form.name}")
        weights = weights_name(str(self._folder))
        return [
            _blocks_of(
                Source(meaning.named(weights, engine), OTHERS_TOKENS),
                Shape(form.layers, heads, width, dtype),
                form,
            )
            for dtype in _ELEMENTS[form.key[0]]
            for engine in self.engines
        ]


def _blocks_of(source: Source, shape: Shape, form: SlotForm) -> SlotBlocks:
    def landing(count: int) -> tuple[PagedCache, Callable[[], Rows]]:
        landed = source.landing(shape, count)
        return landed.paged, lambda: slot_rows(landed.rows(), form)

    return SlotBlocks(source.block_tokens, landing)


def slot_rows(pairs: Sequence[tuple[Any, Any]], form: SlotForm) -> Rows:
    """Return keys and values of other engines as the rows of a slot file."""
    heads, count, width = pairs[0][0].shape
    dtype = _DTYPES[form.key[0]]
    rows = np.empty((form.layers, count, form.row_bytes), np.uint8)
    made = rows.view(dtype).reshape(form.layers, count, 2, heads, width)
    for layer, (keys, values) in enumerate(pairs):
        halves = keys.reshape(heads, count, 2, width // 2)
        made[layer, :, 0].reshape(count, heads, width // 2, 2)[...] = halves.transpose(
            1, 0, 3, 2
        )
        made[layer, :, 1] = values.swapaxes(0, 1)
    return rows


def _compared(where: str, file: Path, folder: Path) -> tuple[Meaning, int, int]:
    """Return the common meaning of their KV, KV heads, and the elements of a head.

    Raises:
        UsageError: Their weights differ, or it is not known whether they do.
    """
    with needed_by("others", extra="llamacpp", distribution="kvwire-engines"):
        import gguf  # noqa: PLC0415 - for this alone

    config = json.loads((folder / "config.json").read_bytes())
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    named = config.get("rope_parameters") or config.get("rope_scaling")
    settings = SimpleNamespace(**config)
    meaning = meaning_of(settings, named, config.get("rope_theta"))
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    architecture = fields["general.architecture"]
    _require(where, file, "general.architecture", architecture, "llama")
    _require(where, file, "rope_type", meaning.rotation, "default")
    layers = int(config["num_hidden_layers"])
    for name, wanted in (
        ("block_count", layers),
        ("attention.head_count_kv", kv_heads),
        ("rope.dimension_count", width),
        ("rope.freq_base", dict(meaning.numbers).get("rope_theta")),
        ("attention.causal", None),
        ("attention.layer_norm_rms_epsilon", np.float32(meaning.epsilon)),
    ):
        _require(where, file, name, fields.get(f"llama.{name}"), wanted)
    # llama.cpp scales by a factor without a type as well, and by one of an older name.
    for name, found in fields.items():
        if name.startswith("llama.rope.") and name not in _ROTATION:
            _require(where, file, name, found, None)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    tensors = {one.name: one for one in reader.tensors}
    for name, values in _tensors(folder):
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = tensors.pop(str(found), None)
        if tensor is None:
            raise UsageError(f"{where}: {file} has no tensor of {shown(name)}")
        order = np.arange(len(values))
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if f".{part}." in name:
                halves = order.reshape(count, 2, width // 2)
                order = halves.swapaxes(1, 2).reshape(-1)
        if not _same_values(tensor, values, order):
            raise UsageError(
                f"{where}: {shown(name)} has other values in {file}: it is quantised, "
                f"or was made of other weights than {folder}"
            )
    if tensors:
        raise UsageError(f"{where}: {folder} has no tensor of {min(tensors)}")
    return meaning, kv_heads, width


def _require(where: str, file: Path, what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise UsageError(
            f"{where}: not known for {file}: {what} is {found}, and not {wanted}"
        )


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield each tensor that transformers reads in a folder, as a view of its file."""
    for path in _files(folder):
        with path.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > path.stat().st_size:
                raise UsageError(f"{path} has no header of safetensors")
            header = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype = _SAFETENSORS.get(entry["dtype"])
            if dtype is None:
                raise UsageError(f"{path}: {shown(name)} is {shown(entry['dtype'])}")
            yield (
                name,
                np.memmap(
                    path,
                    dtype,
                    "r",
                    8 + size + entry["data_offsets"][0],
                    tuple(entry["shape"]),
                ),
            )


def _files(folder: Path) -> list[Path]:
    """Return the safetensors that transformers reads; others may lie beside them."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if index.exists():
        listed = {*json.loads(index.read_bytes())["weight_map"].values()}
        found = [path for path in found if path.name in listed]
    return found


def _same_values(tensor: Any, values: Any, order: Any) -> bool:
    """Compare rows of a GGUF's tensor with those of its source, in that order."""
    kind = _GGUF.get(int(tensor.tensor_type))
    if kind is None:
        return False
    theirs = tensor.data.reshape(len(tensor.data), -1).view(kind)
    ours = values.reshape(len(values), -1)
    if theirs.shape != ours.shape:
        return False
    picked = np.unique(np.linspace(0, len(ours) - 1, _SAMPLES).astype(np.int64))
    if ours.shape[1] == 1:
        picked = np.arange(len(ours))  # a vector
    return np.array_equal(_exact(theirs[picked]), _exact(ours[order[picked]]))


def _exact(values: Any) -> Any:
    if values.dtype == np.uint16:  # bfloat16
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
