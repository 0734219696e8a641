"""Writes the pages."""

from __future__ import annotations

from tests.programs.reference import PAGES
from tests.programs.reference.words import FOLDER

for name, page in PAGES.items():
    (FOLDER / name).parent.mkdir(exist_ok=True)
    (FOLDER / name).write_text(page())
