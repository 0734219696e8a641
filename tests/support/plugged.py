"""Distributions that offer something to kvwire, for one test."""

from __future__ import annotations

from pathlib import Path

import pytest


def plug_in(
    monkeypatch: pytest.MonkeyPatch, folder: Path, group: str, name: str, *values: str
) -> None:
    """Put a distribution on the path for each object that offers itself as ``name``."""
    for number, value in enumerate(values):
        info = folder / f"theirs_{number}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: theirs-{number}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(folder))
