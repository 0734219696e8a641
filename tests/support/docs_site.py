"""What ``make docs`` adds to mkdocs: the order of pages, and files beside ``docs``.

Pages link to files of the tree, such as README.md or kvwire/limits.py. Those that are
linked become part of the site, below ``tree/``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
TREE: Final = "tree"
SECTIONS: Final = {
    "Tutorial": "tutorial",
    "How-to": "howto",
    "Topics": "topics",
    "Reference": "reference",
    "Decisions": "adr",
}
# Not the addresses of others, nor an anchor of the same page.
_LINK: Final = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
# :class:`kvwire.Engine`, :meth:`~kvwire.Connection.pull`: the name in between.
_ROLE: Final = re.compile(r":\w+:`~?([^`]+)`")
_FIRST: Final = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_config(config: MkDocsConfig) -> None:
    """Order the pages: by section, and in each by name."""
    config.nav = [
        {"kvwire": ["index.md", *(f"{TREE}/{name}" for name in _FIRST)]},
        *(
            {title: sorted(f"{folder}/{p.name}" for p in DOCS.glob(f"{folder}/*.md"))}
            for title, folder in SECTIONS.items()
        ),
    ]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files of the tree that pages link to, and those that these link to."""
    from mkdocs.structure.files import File, InclusionLevel

    waiting = [*DOCS.rglob("*.md")]
    added: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for _, target in _LINK.findall(page.read_text()):
            path = Path(os.path.normpath(page.parent / target))
            if path.is_relative_to(DOCS) or path in added or not path.is_file():
                continue
            added.add(path)
            uri = f"{TREE}/{path.relative_to(ROOT).as_posix()}"
            level = InclusionLevel.NOT_IN_NAV
            files.append(
                File.generated(config, uri, abs_src_path=str(path), inclusion=level)
            )
            if path.suffix == ".md":
                waiting.append(path)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead links between ``docs`` and the rest of the tree to where both are now."""
    here = PurePosixPath(page.file.src_uri)
    in_tree = here.parts[0] == TREE
    source = ROOT.joinpath(*here.parts[1:]) if in_tree else DOCS / here

    def lead(found: re.Match[str]) -> str:
        path = Path(os.path.normpath(source.parent / found[2]))
        if path.is_relative_to(DOCS):
            there = path.relative_to(DOCS).as_posix()
        elif path.is_file():
            there = f"{TREE}/{path.relative_to(ROOT).as_posix()}"
        else:
            return found[0]
        return found[1] + os.path.relpath(there, here.parent)

    return _LINK.sub(lead, markdown)


def plain(text: str) -> str:
    """Write the roles of a docstring as code."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`")
