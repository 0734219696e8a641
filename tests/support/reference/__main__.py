"""Writes the pages."""

from __future__ import annotations

from tests.support.reference import FOLDER, PAGES

for name, page in PAGES.items():
    (FOLDER / name).write_text(page())
