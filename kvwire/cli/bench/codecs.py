"""``kvwire bench codecs``: what codecs of KV blocks save, cost and lose.

The rates are of one thread, beside a copy of the same images. What is lost is what the
demo's model makes of it: a prompt's KV goes through the codec and back, and the model
goes on from there, by itself and along the text.
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
SMALL: Final = "demo KV"
LARGE: Final = "demo KV in large blocks"
NORMAL: Final = "normal numbers"
SETS: Final = {SMALL: 16, LARGE: 512, NORMAL: 512}
AXES: Final = ("layer", "kv", "token", "head", "dim")

PROMPT: Final = 256
SCORED: Final = 192
SAID: Final = 32
TEXTS: Final = 4


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


class CodecFinding(NamedTuple):
    """Says what a codec saves of the demo's KV, and what the model loses by it."""

    # Bytes of the entries by those of the images, by set.
    ratios: dict[str, float]
    # Root of the mean square, by that of the numbers.
    error: float
    # Of the text behind the prompts.
    perplexity: float
    # Tokens that the model says otherwise, of those that it says by itself.
    differing: int
    said: int


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
        # (text, layer, component, token, head, element), the tokens in blocks.
        cut = whole.reshape(*whole.shape[:3], -1, SETS[name], *whole.shape[4:])
        values = np.moveaxis(cut, 3, 1).reshape(-1, *form.shape)
    images = np.empty((len(values), form.nbytes), np.uint8)
    put_floats(values.copy(), "bfloat16", images.reshape(-1))
    return images, form


def measured(name: str, texts: int = TEXTS) -> CodecFinding:
    """Find out what a codec saves and loses; without a name, bfloat16 loses it."""
    ratios = {images: _ratio(name, images) for images in SETS if name}
    tokens = _texts(PROMPT + SCORED, texts)
    errors, logs, differing = [], [], 0
    for number, text in enumerate(tokens):
        exact, plain = _without(number, texts)
        kept = through(name, exact)
        errors.append(((kept - exact) ** 2).mean() / (exact**2).mean())
        logs.append(_likelihood(kept, text))
        said = _said(kept, text) if name else plain
        differing += sum(map(int.__ne__, said, plain))
    return CodecFinding(
        ratios,
        float(np.sqrt(np.mean(errors))),
        float(np.exp(-np.mean(logs))),
        differing,
        SAID * len(tokens),
    )


def through(name: str, exact: Floats) -> Floats:
    """Return the KV of a prompt as it is after a codec, by blocks of 16 tokens."""
    _, form = images_of(SMALL)
    layers, components, tokens, *rest = exact.shape
    cut = exact.reshape(layers, components, tokens // 16, 16, *rest)
    blocks = np.moveaxis(cut, 2, 0).copy()
    for block in blocks:
        image, entry = (np.empty(form.nbytes, np.uint8) for _ in range(2))
        put_floats(block.copy(), "bfloat16", image)
        if name and (size := encode_entry(codec_named(name), image, form, entry)):
            decode_entry(entry[:size], form, image, name)
        block[:] = as_floats(image, "bfloat16").reshape(block.shape)
    return np.moveaxis(blocks, 0, 2).reshape(exact.shape)


def command(*, codec: str = "all", rounds: Rounds = 5, common: Common = COMMON) -> int:
    """What codecs of KV blocks save, what they cost, and what a model loses by them.

    The KV is that of the demo's model, which knows its book by heart; and numbers of a
    normal distribution.

    Args:
        codec: Names, separated by commas; or all. Those without loss need the extra
            codecs.
        rounds: How often everybody does their work; more rounds, firmer medians.
        common: Options of every benchmark.
    """
    names = list(CODECS) if codec == "all" else codec.split(",")
    for name in names:
        codec_named(name).require()
    found = {name: measured(name) for name in ("", *names)}
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
        more=lambda _: {"codecs": {n: f._asdict() for n, f in found.items()}},
    )
    return common.run(benchmark, codec=names, rounds=rounds)


def _table(found: Mapping[str, CodecFinding]) -> Table:
    columns = (*SETS, "error", "perplexity", "tokens")
    short = ("demo", "large", "normal", *columns[3:])
    table = new_table("Bytes left of each set; what the demo's model loses", *short)
    for name, one in found.items():
        ratios = [f"{one.ratios[images]:.3f}" if name else "1" for images in SETS]
        table.add_row(
            name or "bfloat16",
            *ratios,
            f"{one.error:.2%}",
            f"{one.perplexity:.4f}",
            f"{one.differing}/{one.said}",
        )
    return table


@cache
def _without(number: int, texts: int) -> tuple[Floats, list[int]]:
    """Return the KV of a prompt, and what the model says with it as bfloat16."""
    text = _texts(PROMPT + SCORED, texts)[number]
    exact = _kv(text[:PROMPT])
    return exact, _said(through("", exact), text)


def _ratio(name: str, images: str) -> float:
    rows, form = images_of(images)
    room = np.empty(form.nbytes, np.uint8)
    sizes = [encode_entry(codec_named(name), row, form, room) for row in rows]
    return sum(size or form.nbytes for size in sizes) / rows.nbytes


@cache
def _llama() -> NumpyLlama:
    return NumpyLlama(1)


@cache
def _texts(length: int, count: int) -> list[list[int]]:
    tokenizer = Tokenizer()
    return [tokenizer.encode(text)[:length] for text in passages(count).values()]


def _kv(prompt: list[int]) -> Floats:
    """Compute the KV of a prompt: (layer, component, token, head, element)."""
    sequence = Plain(8)
    _llama().forward(prompt, sequence)
    kv = [np.stack(layer) for layer in sequence.kv if layer is not None]
    return np.stack(kv)


@cache
def _long_prompts() -> Floats:
    return np.stack([_kv(prompt) for prompt in _texts(512, 2)])


def _behind(kv: Floats) -> Plain:
    """Return a sequence that has the KV of all but the prompt's last token."""
    sequence = Plain(len(kv))
    sequence.length = kv.shape[2] - 1
    sequence.kv = [(layer[0, :-1], layer[1, :-1]) for layer in kv]
    return sequence


def _likelihood(kv: Floats, text: list[int]) -> float:
    """Return the mean log probability of the text behind the prompt."""
    scores = _llama().scores(text[PROMPT - 1 : -1], _behind(kv))
    return float(scores[np.arange(len(scores)), text[PROMPT:]].mean())


def _said(kv: Floats, text: list[int]) -> list[int]:
    """Return what the model says behind the prompt by itself."""
    sequence, said = _behind(kv), [text[PROMPT - 1]]
    while len(said) <= SAID:
        said.append(_llama().forward(said[-1:], sequence).token)
    return said[1:]
