"""The targets, the committed inputs of each, and changes to them.

They are what golden transcripts say, descriptions and entries of codecs as they are
made, and what a fuzzer has found, which
``python -m tests.programs.fuzz --keep`` adds.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.programs.fuzz.guard import Run

TARGETS: Final = (
    "frames",
    "handshake",
    "connection",
    "plans",
    "windows",
    "backends",
    "store",
    "codecs",
)
FOLDER: Final = Path(__file__).with_name("inputs")


def target(name: str) -> Run:
    """The function that a target is."""
    run: Run = importlib.import_module(f"tests.programs.fuzz.targets.{name}").run
    return run


def inputs(name: str) -> list[bytes]:
    """The committed inputs of a target, in the order of their names."""
    return [path.read_bytes() for path in sorted((FOLDER / name).iterdir())]


INPUT_BYTES_MAX = 1024


def mutations(corpus: Sequence[bytes], count: int, seed: str) -> Iterator[bytes]:
    """So many inputs, each made from those of a corpus by one to four changes."""
    chance = random.Random(seed)
    for _ in range(count):
        data = bytearray(chance.choice(corpus))
        for _ in range(chance.randrange(1, 5)):
            _change(chance, data, corpus)
        yield bytes(data[:INPUT_BYTES_MAX])


def _change(chance: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    place = chance.randrange(len(data) + 1)
    match chance.randrange(6):
        case 0 if place < len(data):
            data[place] ^= 1 << chance.randrange(8)
        case 1 if place < len(data):
            data[place] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        case 2:
            data[place:place] = chance.randbytes(chance.randrange(1, 9))
        case 3:
            del data[place : place + chance.randrange(1, 9)]
        case 4:
            data[place:place] = data[place : place + chance.randrange(1, 33)]
        case _:
            other = chance.choice(corpus)
            start = chance.randrange(len(other) + 1)
            data[place:] = other[start:]
