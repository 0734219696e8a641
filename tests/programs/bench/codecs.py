"""``python -m tests.programs.bench codecs``: what codecs of KV save, cost and lose.

The rates are of one thread, beside a copy of the same images. What is lost is the error
of the numbers, of the KV of the demo's model among others. That lies in ``examples``,
which has to be in ``PYTHONPATH``.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from rich.table import Table

import kvwire
from demo.book import Tokenizer, passages
from demo.numpy_llama import Floats, NumpyLlama, Plain
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import COMMON, Common, Rounds, new_table
from kvwire.cli.bench.side import Bench, Work
from kvwire.cli.bench.turns import GIGABYTES_PER_SECOND, Benchmark, Case
from kvwire.kv.codecs.base import ImageForm, form_of
from kvwire.kv.codecs.entry import decode_entry, encode_entry
from kvwire.kv.codecs.floats import as_floats, put_floats
from kvwire.kv.codecs.registry import CODECS, codec_named
from kvwire.types import in_bytes

ENCODE: Final = "encode"
DECODE: Final = "decode"
# Sets of images by name, with the tokens of a block: of the demo's model, of the same
# with a prompt as one block, and numbers of a normal distribution.
SMALL: Final = "demo KV"
LARGE: Final = "demo KV in large blocks"
NORMAL: Final = "normal numbers"
SETS: Final = {SMALL: 16, LARGE: 512, NORMAL: 512}
AXES: Final = ("layer", "kv", "token", "head", "dim")
_DTYPE: Final = "bfloat16"
_TEXTS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecWork(Work):
    """Images of a set through a codec; ``verb`` says which way."""

    codec: str
    # The name of the set.
    images: str


async def codecs(b: Bench) -> None:
    """Encode and decode; with the option ``copy``, copy instead."""
    async for work in b.works(CodecWork):
        coded = Coded(work.codec, work.images)
        job = {ENCODE: coded.encode, DECODE: coded.decode}[work.verb]
        if "copy" in b.options:
            job = coded.copy
        async with b.clock():
            began = time.perf_counter()
            for at in range(work.count):
                job(at)
            seconds = time.perf_counter() - began
        await b.report([seconds])


class Coded:
    """Images of a set, what a codec makes of them, and what comes out again."""

    def __init__(self, codec: str, images: str) -> None:
        self._codec = codec_named(codec)
        self._name = codec
        self.images, self.form = images_of(images)
        # Written to, so that no page is missing when it is timed.
        self.decoded = np.ones_like(self.images)
        self._entries = np.ones_like(self.images)
        rows = range(len(self.images))
        # 0 for an image that does not shrink, and is kept as it is.
        self.sizes = [self.encode(at) for at in rows]

    def encode(self, at: int) -> int:
        return encode_entry(self._codec, self.images[at], self.form, self._entries[at])

    def decode(self, at: int) -> int:
        entry = self._entries[at, : self.sizes[at]]
        decode_entry(entry, self.form, self.decoded[at], self._name)
        return self.form.nbytes

    def copy(self, at: int) -> int:
        np.copyto(self.decoded[at], self.images[at])
        return self.form.nbytes


@dataclass(frozen=True, slots=True)
class Loss:
    """Shows what a codec leaves of a set's bytes, and the error of its numbers.

    The error is the root of the mean square, by that of the numbers.
    """

    ratio: float
    error: float


def loss(codec: str, images: str) -> Loss:
    coded = Coded(codec, images)
    for at, size in enumerate(coded.sizes):
        (coded.decode if size else coded.copy)(at)
    kept = sum(size or coded.form.nbytes for size in coded.sizes)
    exact, found = (
        as_floats(whole.reshape(-1), _DTYPE) for whole in (coded.images, coded.decoded)
    )
    error = np.sqrt(((found - exact) ** 2).mean() / (exact**2).mean())
    return Loss(kept / coded.images.nbytes, float(error))


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


def command(*, codec: str = "all", rounds: Rounds = 5, common: Common = COMMON) -> int:
    """Measure what codecs of KV blocks save and cost, and the error of what they keep.

    The KV is that of the demo's model, which knows its book by heart; and numbers of a
    normal distribution.

    Args:
        codec: Names, separated by commas; or all. Those without loss need the extra
            codecs.
        rounds: The number of rounds; more rounds give firmer medians.
        common: Options of every benchmark.
    """
    names = list(CODECS) if codec == "all" else codec.split(",")
    for name in names:
        codec_named(name).require()
    found = {name: {images: loss(name, images) for images in SETS} for name in names}
    # Each a process, for all cases.
    ours = Contender("kvwire", codecs, alone=True)
    memcpy = Contender("memcpy", codecs, alone=True, options={"copy": 1})
    forms = {images: images_of(images) for images in SETS}
    benchmark = Benchmark(
        name="codecs",
        cases=[
            Case(
                name=f"{name} {verb}",
                work=CodecWork(
                    verb=verb,
                    nbytes=form.nbytes,
                    count=len(rows),
                    codec=name,
                    images=images,
                ),
                unit=GIGABYTES_PER_SECOND,
                ours=[ours],
                beside=[memcpy],
                group=f"{images}, {in_bytes(form.nbytes)}",
            )
            for images, (rows, form) in forms.items()
            for name in names
            for verb in (ENCODE, DECODE)
        ],
        notes=[f"One thread; {_DTYPE}. Rates are of the images' bytes."],
        below=lambda _: [_table(found)],
        more=lambda _: {
            "codecs": {
                name: {images: asdict(one) for images, one in of.items()}
                for name, of in found.items()
            }
        },
    )
    return common.run(benchmark, codec=names, rounds=rounds)


def _table(found: dict[str, dict[str, Loss]]) -> Table:
    columns = ("demo", "error", "large", "error", "normal", "error")
    table = new_table("Bytes left of each set, and the error of its numbers", *columns)
    for name, of in found.items():
        cells = ((f"{one.ratio:.3f}", f"{one.error:.2%}") for one in of.values())
        table.add_row(name, *(cell for both in cells for cell in both))
    return table
