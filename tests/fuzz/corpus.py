"""The targets, and the committed inputs of each.

They are what golden transcripts say, descriptions and entries of codecs as they are
made, and what a fuzzer has found: ``python -m tests.fuzz --keep`` adds to them.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Final

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
