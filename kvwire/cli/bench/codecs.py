"""``kvwire bench codecs``: what codecs of KV blocks save, cost and lose.

The rates are of one thread, beside a copy of the same images. What is lost is the error
of the images' numbers, after a way through the codec and back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.table import Table

import kvwire
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.report import COMMON, Common, Rounds, new_table, size_name
from kvwire.cli.bench.side import Side
from kvwire.cli.bench.turns import GIGABYTES_PER_SECOND, Benchmark, Case
from kvwire.cli.demo.book import Tokenizer, passages
from kvwire.cli.demo.numpy_llama import Floats, NumpyLlama, Plain
from kvwire.kv.codecs.base import ImageForm, form_of
from kvwire.kv.codecs.entry import decode_entry, encode_entry
from kvwire.kv.codecs.floats import as_floats, put_floats
from kvwire.kv.codecs.registry import CODECS, codec_named

ENCODE: Final = "encode"
DECODE: Final = "decode"
# Sets of images by name, with the tokens of a block: of the demo's model, of the same
# with a prompt as one block, and numbers of a normal distribution.
SETS: Final = {"demo KV": 16, "demo KV in large blocks": 512, "normal numbers": 512}
NORMAL: Final = [*SETS][-1]
AXES: Final = ("layer", "kv", "token", "head", "dim")
PROMPTS: Final = 2
PROMPT_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecWork(Work):
    """Images of a set through a codec; ``verb`` says which way."""

    codec: str
    # The name of the set.
    images: str


class CodecSide(Side[CodecWork]):
    """Encodes and decodes; with the option ``copy`` it copies instead."""

    work_type = CodecWork

    async def drive(self, work: CodecWork) -> dict[str, Any]:
        images, form = images_of(work.images)
        into, entries = np.empty_like(images), np.empty_like(images)
        codec, rows = codec_named(work.codec), range(len(images))
        sizes = [encode_entry(codec, images[at], form, entries[at]) for at in rows]
        jobs: dict[str, Callable[[int], object]] = {
            ENCODE: lambda at: encode_entry(codec, images[at], form, entries[at]),
            DECODE: lambda at: decode_entry(
                entries[at, : sizes[at]], form, into[at], work.codec
            ),
            "copy": lambda at: np.copyto(into[at], images[at]),
        }
        job = jobs["copy" if "copy" in self.options else work.verb]
        into[:] = 1  # its pages are there
        began, cpu = time.perf_counter(), time.thread_time()
        for at in rows:
            job(at)
        took, cpu = time.perf_counter() - began, time.thread_time() - cpu
        return {"values": [images.nbytes / took], "cpu_s": cpu}


class Saving(NamedTuple):
    """Says what a codec saves of a set of images, and what it loses."""

    # Bytes of the entries by those of the images.
    ratio: float
    # Root of the mean square, by that of the numbers.
    error: float


@cache
def images_of(name: str) -> tuple[npt.NDArray[np.uint8], ImageForm]:
    """Return images of a set, one in each row, and their form."""
    spec = kvwire.KVSpec(
        layers=8, kv_heads=2, head_dim=32, block_tokens=SETS[name], dtype="bfloat16"
    )
    form = form_of(spec, AXES)
    if name == NORMAL:
        rng = np.random.default_rng(0)
        values: Floats = rng.standard_normal((4, *form.shape), np.float32)
    else:
        whole = _long_prompts()
        # The tokens in blocks.
        cut = whole.reshape(*whole.shape[:3], -1, SETS[name], *whole.shape[4:])
        values = np.moveaxis(cut, 3, 1).reshape(-1, *form.shape)
    images = np.empty((len(values), form.nbytes), np.uint8)
    put_floats(values.copy(), "bfloat16", images.reshape(-1))
    return images, form


def saving(name: str, images: str) -> Saving:
    """Find out what a codec saves of a set and loses."""
    rows, form = images_of(images)
    codec, kept, nbytes = codec_named(name), rows.copy(), 0
    entry = np.empty(form.nbytes, np.uint8)
    for row, back in zip(rows, kept, strict=True):
        # An image that does not shrink is kept as it is.
        size = encode_entry(codec, row, form, entry)
        nbytes += size or form.nbytes
        if size:
            decode_entry(entry[:size], form, back, name)
    exact, coarse = (as_floats(one.reshape(-1), "bfloat16") for one in (rows, kept))
    error = ((coarse - exact) ** 2).mean() / (exact**2).mean()
    return Saving(nbytes / rows.nbytes, float(np.sqrt(error)))


def command(*, codec: str = "all", rounds: Rounds = 5, common: Common = COMMON) -> int:
    """What codecs of KV blocks save, what they cost, and how exact they are.

    The KV is that of the demo's model; and numbers of a normal distribution.

    Args:
        codec: Names, separated by commas; or all. Those without loss need the extra
            codecs.
        rounds: How often everybody does their work; more rounds, firmer medians.
        common: Options of every benchmark.
    """
    names = list(CODECS) if codec == "all" else codec.split(",")
    for name in names:
        codec_named(name).require()
    found = {n: {images: saving(n, images) for images in SETS} for n in names}
    # Each a process, for all cases.
    ours = Contender("kvwire", CodecSide, alone=True)
    memcpy = Contender("memcpy", CodecSide, alone=True, options={"copy": 1})
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
                contenders=[ours, memcpy],
                group=f"{images}, {size_name(form.nbytes)}",
            )
            for images, (rows, form) in forms.items()
            for name in names
            for verb in (ENCODE, DECODE)
        ],
        notes=["One thread; bfloat16. Rates are of the images' bytes."],
        below=lambda _: [_table(found)],
        more=lambda _: {
            "codecs": {
                name: {images: one._asdict() for images, one in by_set.items()}
                for name, by_set in found.items()
            }
        },
    )
    return common.run(benchmark, codec=names, rounds=rounds)


def _table(found: Mapping[str, Mapping[str, Saving]]) -> Table:
    table = new_table("Bytes left of each set, and the error of its numbers", *SETS)
    for name, by_set in found.items():
        cells = (f"{one.ratio:.3f}, {one.error:.2%}" for one in by_set.values())
        table.add_row(name, *cells)
    return table


@cache
def _long_prompts() -> Floats:
    """Compute the KV of prompts: (text, layer, component, token, head, element)."""
    llama, tokenizer = NumpyLlama(1), Tokenizer()
    prompts = []
    for text in passages(PROMPTS).values():
        sequence = Plain(8)
        llama.forward(tokenizer.encode(text)[:PROMPT_TOKENS], sequence)
        prompts.append(np.stack([np.stack(kv) for kv in sequence.kv if kv is not None]))
    return np.stack(prompts)
