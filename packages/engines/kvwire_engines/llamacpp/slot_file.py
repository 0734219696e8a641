"""llama.cpp's slot files: the tokens of one sequence, and their KV.

llama-server writes such a file for ``POST /slots/N?action=save`` and reads one for
``action=restore``. It has no checksum, and no name for the weights, so the reader
must know both. All numbers are little-endian::

    magic, version, words; marker, 1, count, tokens ..., 0         the tokens
    streams; for each: cells, 0 in all but one, which has:
      for each cell: position, 1, sequence
      transposed, layers, rotation of keys, rotation of values
      for each layer: type, bytes a row; a row for each cell       the keys
      for each layer: type, bytes a row; a row for each cell       the values
        or: type, bytes an element, elements; for each element one of each cell

A row is all that a layer keeps of one token, so a beginning of the tokens has the same
beginning of the rows, whatever types they are quantised to. What windows and recurrent
layers keep is not of this form, and is refused by name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError

Rows: TypeAlias = npt.NDArray[np.uint8]
"""(layers, tokens, bytes): keys and then values of each token."""
TokenIds: TypeAlias = npt.NDArray[np.int64]

_MAGIC: Final = int.from_bytes(b"qsgg", "little")
VERSION: Final = 4
"""LLAMA_STATE_SEQ_VERSION of llama.cpp since October 2026."""
# What a list of tokens begins with in this version.
_MARKER: Final = 0xFFFFFFFF
_STREAMS_MAX: Final = 256
_LAYERS_MAX: Final = 1024
_ROW_BYTES_MAX: Final = 1 << 24
_U32: Final = np.dtype("<u4")


class SlotForm(NamedTuple):
    """The facts on which a slot file depends, besides its tokens and the weights.

    Attributes:
        streams: Sequences for which the server keeps cells apart.
        transposed: 1 if values are kept by element, as without flash attention.
        layers: The number of layers.
        rotations: How keys and values were rotated before they were quantised.
        key: The type of keys, a ``ggml_type``, and the bytes of a row.
        value: The same of values.
        element_bytes: Bytes of one element of transposed values; otherwise 0.
    """

    streams: int
    transposed: int
    layers: int
    rotations: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    element_bytes: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes that a layer keeps of one token."""
        return self.key[1] + self.value[1]

    @property
    def name(self) -> str:
        """Return a text that is equal if the KV of one server suits another one."""
        return (
            f"slot v{VERSION} {'' if self.transposed else 'flash '}"
            f"k={_TYPES.get(self.key[0], self.key[0])}x{self.key[1]} "
            f"v={_TYPES.get(self.value[0], self.value[0])}x{self.value[1]} "
            f"rot={self.rotations[0]},{self.rotations[1]}"
        )


class SlotFile(NamedTuple):
    """The content of a slot file."""

    form: SlotForm
    tokens: TokenIds
    rows: Rows


_TYPES: Final = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0",
    20: "iq4_nl", 30: "bf16",
}  # fmt: skip


def read_slot(data: bytes | memoryview) -> SlotFile:
    """Return a slot file's tokens and rows.

    Args:
        data: The file's content.

    Raises:
        UsageError: It is damaged, or of another version; or the model keeps more than
            keys and values of each token (windows, states, images).
    """
    reader = _Reader(data)
    tokens = _read_tokens(reader)
    streams = reader.count("streams", _STREAMS_MAX)
    before = 0
    while not (cells := reader.word()) and before < streams - 1:
        before += 1
    _read_cells(reader, cells, tokens.size)
    transposed = reader.word()
    layers = reader.count("layers", _LAYERS_MAX)
    rotations = (reader.word(), reader.word())
    if transposed > 1:
        raise UsageError(f"slot file: {transposed} as the order of values")
    keys = [_read_rows(reader, tokens.size) for _ in range(layers)]
    if transposed:
        found = [_read_elements(reader, tokens.size) for _ in range(layers)]
        element_bytes = _same("bytes of an element", [one[2] for one in found])
        values = [(kind, rows) for kind, rows, _ in found]
    else:
        element_bytes = 0
        values = [_read_rows(reader, tokens.size) for _ in range(layers)]
    for _ in range(before + 1, streams):
        if reader.word():
            raise UsageError("slot file: the cells of several sequences")
    reader.end()
    form = SlotForm(
        streams,
        transposed,
        layers,
        rotations,
        _same("keys", [(kind, rows.shape[1]) for kind, rows in keys]),
        _same("values", [(kind, rows.shape[1]) for kind, rows in values]),
        element_bytes,
    )
    rows = np.empty((layers, tokens.size, form.row_bytes), np.uint8)
    for layer, (one, other) in enumerate(zip(keys, values, strict=True)):
        rows[layer, :, : form.key[1]] = one[1]
        rows[layer, :, form.key[1] :] = other[1]
    return SlotFile(form, tokens, rows)


def write_slot(slot: SlotFile) -> bytes:
    """Return the content of a slot file, as llama-server of this form writes it."""
    form, tokens, rows = slot
    count = tokens.size
    ids = tokens.astype(_U32).tobytes()
    parts: list[Any] = [
        struct.pack("<3I", _MAGIC, VERSION, count + 4),
        struct.pack("<3I", _MARKER, 1, count) + ids + bytes(4),
        struct.pack("<2I", form.streams, count),
        np.stack(
            (np.arange(count), np.ones(count), np.zeros(count)), axis=1, dtype=_U32,
            casting="unsafe",
        ).tobytes(),
        struct.pack("<4I", form.transposed, form.layers, *form.rotations),
    ]  # fmt: skip
    kind, nbytes = form.key
    for layer in range(form.layers):
        parts += (struct.pack("<IQ", kind, nbytes), rows[layer, :, :nbytes].tobytes())
    kind, size = form.value
    for layer in range(form.layers):
        values = rows[layer, :, nbytes:]
        if form.transposed:
            elements = size // form.element_bytes
            by_element = values.reshape(count, elements, form.element_bytes)
            head = struct.pack("<3I", kind, form.element_bytes, elements)
            parts += (head, by_element.transpose(1, 0, 2).tobytes())
        else:
            parts += (struct.pack("<IQ", kind, size), values.tobytes())
    parts.append(bytes(4 * (form.streams - 1)))  # no cells in the others
    return b"".join(parts)


class _Reader:
    """Reads a slot file's numbers, none of them beyond its end."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, nbytes: int) -> memoryview:
        if nbytes > self._data.nbytes - self._at:
            raise UsageError(
                f"slot file: it ends at {self._data.nbytes} bytes, in the middle of "
                "its content; it was cut, or this model keeps more than keys and values"
            )
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def word(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def count(self, what: str, most: int) -> int:
        found = self.word()
        if not 1 <= found <= most:
            raise UsageError(f"slot file: {found} {what}; 1 to {most} are possible")
        return found

    def row_bytes(self, nbytes: int) -> int:
        if not 1 <= nbytes <= _ROW_BYTES_MAX:
            raise UsageError(
                f"slot file: a row of {nbytes} bytes; this model keeps something else "
                "than keys and values of each token"
            )
        return nbytes

    def end(self) -> None:
        left = self._data.nbytes - self._at
        if left:
            raise UsageError(
                f"slot file: {left} bytes behind the values: this model keeps more "
                "than keys and values of each token (windows, states or a draft), "
                "which kvwire cannot cut by tokens"
            )


def _read_tokens(reader: _Reader) -> TokenIds:
    magic = reader.word()
    version = reader.word()
    if magic != _MAGIC:
        raise UsageError("slot file: it is no slot file of llama.cpp")
    if version != VERSION:
        raise UsageError(
            f"slot file: llama.cpp wrote version {version}; known is {VERSION}. Use a "
            "llama.cpp since October 2026"
        )
    words = np.frombuffer(reader.take(4 * reader.word()), _U32)
    plain = words.size >= 4 and words[0] == _MARKER and words[1] == 1
    if not plain or words[2] != words.size - 4 or words[-1]:
        raise UsageError("slot file: the prompt has images or audio besides tokens")
    if words.size == 4:
        raise UsageError("slot file: the slot has no tokens")
    return words[3:-1].astype(np.int64)


def _read_cells(reader: _Reader, cells: int, tokens: int) -> None:
    """Check that there is one cell for each token, at the token's position."""
    if cells != tokens:
        raise UsageError(
            f"slot file: {cells} cells of {tokens} tokens: this model keeps only the "
            "last tokens of a window, or states"
        )
    table = np.frombuffer(reader.take(12 * cells), _U32).reshape(-1, 3)
    if (table[:, 0] != np.arange(cells)).any() or (table[:, 1] != 1).any():
        raise UsageError(
            "slot file: positions are not those of the tokens; the context was "
            "shifted, or several sequences share cells"
        )


def _read_rows(reader: _Reader, tokens: int) -> tuple[int, Rows]:
    kind = reader.word()
    nbytes = reader.row_bytes(int.from_bytes(reader.take(8), "little"))
    return kind, np.frombuffer(reader.take(tokens * nbytes), np.uint8).reshape(
        tokens, nbytes
    )


def _read_elements(reader: _Reader, tokens: int) -> tuple[int, Rows, int]:
    kind = reader.word()
    size = reader.row_bytes(reader.word())
    elements = reader.word()
    nbytes = reader.row_bytes(elements * size)
    raw = np.frombuffer(reader.take(tokens * nbytes), np.uint8)
    by_token = raw.reshape(elements, tokens, size).transpose(1, 0, 2)
    return kind, by_token.reshape(tokens, nbytes), size


def _same(what: str, found: Sequence[Any]) -> Any:
    if len(set(found)) != 1:
        raise UsageError(
            f"slot file: the layers differ in {what}: {sorted(set(found))}; kvwire "
            "keeps sessions of models whose layers are alike"
        )
    return found[0]
