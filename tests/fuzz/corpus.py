"""The targets, the committed inputs of each, changes to them, and what they reach.

They are what golden transcripts say, descriptions and entries of codecs as they are
made, and what a fuzzer has found: ``python -m tests.fuzz --keep`` adds to them.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tests.fuzz.guard import Run

TARGETS: Final = (
    *("header", "frames", "handshake", "connection", "grants"),
    *("plans", "backends", "store", "codecs"),
)
FOLDER: Final = Path(__file__).with_name("inputs")


def target(name: str) -> Run:
    """The function that a target is."""
    run: Run = importlib.import_module(f"tests.fuzz.targets.{name}").run
    return run


def inputs(name: str) -> list[bytes]:
    """The committed inputs of a target, in the order of their names."""
    return [path.read_bytes() for path in sorted((FOLDER / name).iterdir())]


def keep(name: str, data: bytes) -> None:
    """Add an input, named after its content."""
    (FOLDER / name / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


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


Edge = tuple[str, int, int]
"""A file, and two lines of it that were run one after the other."""

_CORE: Final = (
    *(
        "kvwire/wire/",
        "kvwire/proto/",
        "kvwire/region.py",
        "kvwire/transfers/description.py",
    ),
    *(
        "kvwire/kv/",
        "kvwire/transfers/receiver.py",
        "kvwire/store/server/messages.py",
        "backends/",
    ),
)


def edges(run: Run, data: bytes) -> set[Edge]:
    """What an input reaches in the core."""
    found: set[Edge] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if event != "call" or not any(part in name for part in _CORE):
            return None
        last = frame.f_lineno

        def lines(inner: FrameType, what: str, _: Any) -> Any:
            nonlocal last
            if what == "line":
                found.add((name, last, inner.f_lineno))
                last = inner.f_lineno
            return lines

        return lines

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(data)
    finally:
        sys.settrace(before)
    return found


def smallest(run: Run, kept: Iterable[bytes], found: Iterable[bytes]) -> list[bytes]:
    """Those of ``found``, shortest first, that reach what nothing before them does."""
    reached: set[Edge] = set()
    for data in kept:
        reached |= edges(run, data)
    chosen = []
    for data in sorted(set(found), key=lambda data: (len(data), data)):
        fresh = edges(run, data) - reached
        if fresh:
            reached |= fresh
            chosen.append(data)
    return chosen
