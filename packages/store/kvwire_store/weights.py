"""A name for a model's weights: KV is useful only to an engine with the same weights.

A model's config describes its shapes, and every fine-tune has the same shapes. So the
name is a digest of the files' content: the name, type and shape of each tensor, and
samples of its bytes. The same tensors give the same name, wherever the files are and
however the tensors are divided among them.

Only samples are read: about 32 MiB for a model of any size, or 4 KiB per tensor if that
is more. Training changes most values of every tensor that it changes, so samples
suffice. A change to a few single values may be missed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from kvwire.errors import UsageError, shown
from kvwire.limits import MIB

# A page of memory, the smallest unit that a disk reads.
_WINDOW_BYTES: Final = 4096
# The total of all tensors' samples.
_WINDOWS: Final = 32 * MIB // _WINDOW_BYTES
# Disks and file servers answer this many parallel reads as fast as one.
_THREADS: Final = 8
# The limit in the format's definition.
_HEADER_BYTES_MAX: Final = 100_000_000
# Weights are the files that match the first matching pattern; engines use this order.
_PATTERNS: Final = (
    "consolidated*.safetensors",
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.tensors",
)
# Files that trainers leave beside the weights.
_OTHERS: Final = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
)
# An adapter's configuration, which contains the scale of its weights.
_CONFIG: Final = "adapter_config.json"


class _File(NamedTuple):
    """The identity of one state of a file."""

    path: Path
    nbytes: int
    changed_ns: int


class _Piece(NamedTuple):
    """The place of a tensor's bytes, or of a file whose format is not parsed."""

    name: str  # the tensor with its type and shape, or the file
    path: Path
    first: int
    nbytes: int


def weights_name(model: str, *, revision: str = "", cache: str = "") -> str:
    """Return a name for the weights in a folder or a file; 32 hexadecimal digits.

    Args:
        model: A path, or the name of a Hugging Face repository whose files have been
            downloaded to this host.
        revision: The repository's revision; if empty, only one may be on this host.
        cache: The folder of downloaded files, if it is not the usual one.

    Raises:
        UsageError: There are no weights, or they cannot be read.
    """
    try:
        found = _files(_place(model, revision, cache))
        if not found:
            raise UsageError(
                f"model={shown(model)}: found no weights among its files on this host "
                f"({', '.join(_PATTERNS[1:])})"
            )
        return _name(tuple(found))
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(
            f"model={shown(model)}: cannot read its weights: {exc}"
        ) from None


def _place(model: str, revision: str, cache: str) -> Path:
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    try:
        import huggingface_hub as hub  # noqa: PLC0415 - engines bring it
        from huggingface_hub import constants  # noqa: PLC0415

        if not revision:
            known = "--".join(("models", *model.split("/")))
            snapshots = [
                *(Path(cache or constants.HF_HUB_CACHE) / known / "snapshots").iterdir()
            ]
            if len(snapshots) != 1:
                raise UsageError(
                    f"model={shown(model)}: {len(snapshots)} of its revisions are on "
                    "this host; pass the path of one"
                )
            return snapshots[0]
        return Path(
            hub.snapshot_download(
                model, revision=revision, cache_dir=cache or None, local_files_only=True
            )
        )
    except UsageError:
        raise
    except Exception as exc:  # noqa: BLE001 - of a library that raises many kinds
        raise UsageError(
            f"model={shown(model)}: it is neither a path nor a repository downloaded "
            f"to this host ({type(exc).__name__})"
        ) from None


def _files(place: Path) -> list[_File]:
    """Return the files that contain weights, sorted by name."""
    paths = [place]
    if place.is_dir():
        for pattern in _PATTERNS:
            paths = sorted(
                one for one in place.glob(pattern) if one.name not in _OTHERS
            )
            if paths:
                break
        index = place / "model.safetensors.index.json"
        if index.exists() and pattern == "*.safetensors":
            listed = set(json.loads(index.read_bytes())["weight_map"].values())
            paths = [one for one in paths if one.name in listed] or paths
        if paths and (place / _CONFIG).exists():
            paths.append(place / _CONFIG)
    stats = [(path, path.stat()) for path in paths]
    return [_File(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


# Cached per state of the files, of models and of adapters.
@functools.lru_cache(256)
def _name(files: tuple[_File, ...]) -> str:
    pieces: list[_Piece] = []
    for file in files:
        if file.path.suffix == ".safetensors":
            pieces += _tensors(file)
        else:
            pieces.append(_Piece(file.path.name, file.path, 0, file.nbytes))
    pieces.sort()
    windows = max(1, _WINDOWS // len(pieces))
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = [pieces[at : at + 64] for at in range(0, len(pieces), 64)]
        read = pool.map(functools.partial(_sampled, windows=windows), parts)
        made = hashlib.sha256(b"".join(read))
    return made.hexdigest()[:32]


def _tensors(file: _File) -> list[_Piece]:
    """Return the tensors of a safetensors file, from its header."""
    with file.path.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > min(file.nbytes, _HEADER_BYTES_MAX):
            raise ValueError(f"{file.path} has no safetensors header")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        first, stop = entry["data_offsets"]
        named = json.dumps([name, entry["dtype"], entry["shape"]])
        found.append(_Piece(named, file.path, 8 + size + first, stop - first))
    return found


def _sampled(pieces: Sequence[_Piece], *, windows: int) -> bytes:
    """Return the digests of all pieces; each covers the name, length and samples."""
    found: list[bytes] = []
    for piece in pieces:
        made = hashlib.sha256(f"{piece.name} {piece.nbytes}".encode())
        last = max(0, piece.nbytes - _WINDOW_BYTES)
        count = min(windows, -(-piece.nbytes // _WINDOW_BYTES))
        descriptor = os.open(piece.path, os.O_RDONLY)
        try:
            for at in range(count):
                first = last * at // max(1, count - 1) if count > 1 else last // 2
                size = min(_WINDOW_BYTES, piece.nbytes)
                made.update(os.pread(descriptor, size, piece.first + first))
        finally:
            os.close(descriptor)
        found.append(made.digest())
    return b"".join(found)
