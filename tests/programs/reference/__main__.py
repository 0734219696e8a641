"""Writes the pages."""

from __future__ import annotations

from tests.programs.reference import PAGES
from tests.support.tree import ROOT

for name, page in PAGES.items():
    (ROOT / "docs" / name).write_text(page())
