"""What the codec of KV blocks saves and costs.

The rates are of one thread, beside a copy of the same images, of the KV of the demo's
model among others. That lies in ``examples``, which has to be in ``PYTHONPATH``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

import kvwire
from demo.book import Tokenizer, passages
from demo.numpy_llama import Floats, NumpyLlama, Plain
from kvwire.kv.floats import put_floats
from kvwire_store.codecs.entry import decode_entry, encode_entry
from kvwire_store.codecs.form import ImageForm, form_of

# Sets of images by name, with the tokens of a block: of the demo's model, of the same
# with a prompt as one block, and numbers of a normal distribution.
SMALL: Final = "demo KV"
LARGE: Final = "demo KV in large blocks"
NORMAL: Final = "normal numbers"
SETS: Final = {SMALL: 16, LARGE: 512, NORMAL: 512}
AXES: Final = ("layer", "kv", "token", "head", "dim")
_DTYPE: Final = "bfloat16"
_TEXTS: Final = 2


class Coded:
    """Images of a set, what the codec makes of them, and what comes out again."""

    def __init__(self, images: str) -> None:
        self.images, self.form = images_of(images)
        # Written to, so that no page is missing when it is timed.
        self.decoded = np.ones_like(self.images)
        self._entries = np.ones_like(self.images)
        rows = range(len(self.images))
        # 0 for an image that does not shrink, and is kept as it is.
        self.sizes = [self.encode(at) for at in rows]

    def encode(self, at: int) -> int:
        return encode_entry(self.images[at], self.form, self._entries[at])

    def decode(self, at: int) -> int:
        entry = self._entries[at, : self.sizes[at]]
        decode_entry(entry, self.form, self.decoded[at])
        return self.form.nbytes

    def copy(self, at: int) -> int:
        np.copyto(self.decoded[at], self.images[at])
        return self.form.nbytes


@dataclass(frozen=True, slots=True)
class Finding:
    """Shows what the codec leaves of a set's bytes, and what that costs.

    Rates are of the images' bytes, medians of rounds that the three take in turns.
    """

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    memcpy_bytes_per_s: float

    def __str__(self) -> str:
        rates = (
            self.encode_bytes_per_s,
            self.decode_bytes_per_s,
            self.memcpy_bytes_per_s,
        )
        each = ", ".join(f"{rate / 1e9:.2f}" for rate in rates)
        return f"{self.ratio:.3f} left; GB/s to encode, to decode, of a memcpy: {each}"


def measure(images: str, rounds: int) -> Finding:
    coded = Coded(images)
    rows = range(len(coded.images))
    for at, size in enumerate(coded.sizes):
        (coded.decode if size else coded.copy)(at)
    kept = sum(size or coded.form.nbytes for size in coded.sizes)
    assert np.array_equal(coded.decoded, coded.images)

    def seconds(job: Callable[[int], int]) -> float:
        began = time.thread_time()
        for at in rows:
            job(at)
        return time.thread_time() - began

    def decode(at: int) -> int:
        return (coded.decode if coded.sizes[at] else coded.copy)(at)

    took = [
        [seconds(job) for job in (coded.encode, decode, coded.copy)]
        for _ in range(rounds)
    ]
    rates = [coded.images.nbytes / median(each) for each in zip(*took, strict=True)]
    return Finding(kept / coded.images.nbytes, *rates)


@cache
def images_of(name: str) -> tuple[npt.NDArray[np.uint8], ImageForm]:
    """Return images of a set, one in each row, and their form."""
    spec = kvwire.KVSpec(
        layers=8, kv_heads=2, head_dim=32, block_tokens=SETS[name], dtype=_DTYPE
    )
    form = form_of(spec, AXES)
    if name == NORMAL:
        rng = np.random.default_rng(0)
        values: Floats = rng.standard_normal((4, *form.shape), np.float32)
    else:
        whole = _prompts()
        # (text, layer, component, token, head, element), the tokens in blocks.
        cut = whole.reshape(*whole.shape[:3], -1, SETS[name], *whole.shape[4:])
        values = np.moveaxis(cut, 3, 1).reshape(-1, *form.shape)
    images = np.empty((len(values), form.nbytes), np.uint8)
    put_floats(values.copy(), _DTYPE, images.reshape(-1))
    return images, form


@cache
def _prompts() -> Floats:
    """Compute the KV of prompts with the demo's model, whose book it knows."""
    tokenizer, llama, found = Tokenizer(), NumpyLlama(1), []
    for text in passages(_TEXTS).values():
        sequence = Plain(8)
        llama.forward(tokenizer.encode(text)[: SETS[LARGE]], sequence)
        found.append(np.stack([np.stack(kv) for kv in sequence.kv if kv is not None]))
    return np.stack(found)
