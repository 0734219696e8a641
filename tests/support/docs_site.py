"""What ``make docs`` adds to mkdocs: order, first page, other files, versions.

Pages are in the order and the groups of docs/index.md. The first page begins with what
README.md says first, and has the index below. Keys of the configuration lead to their
rows. Each minor version of kvwire has a folder of its own, so that a folder in which an
older one was built keeps it.

Pages link to files of the tree, such as README.md or kvwire/limits.py. Those that are
linked become part of the site, below ``tree/``.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
TREE: Final = "tree"
# A group of docs/index.md, and a page in it.
_GROUP: Final = re.compile(r"\* \*\*(?:(?P<tab>[^*:]+): )?(?P<name>[^*]+)\*\*$")
_VERSION: Final = re.compile(r'^__version__ = "(\d+\.\d+)', re.MULTILINE)
# Not the addresses of others, nor an anchor of the same page.
_LINK: Final = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
# :class:`kvwire.Engine`, :meth:`~kvwire.Connection.pull`: the name in between.
_ROLE: Final = re.compile(r":\w+:`~?([^`]+)`")
# A key of the configuration, as code; a link, which stays as it is, or a heading.
_CODE: Final = re.compile(r"^#.*|\[[^\]]*\]\([^)]*\)|`(\w+)`", re.MULTILINE)
_KEYS: Final = DOCS / "reference" / "configuration.md"
_FOLDERS: Final = {"tutorial", "howto", "topics", "reference"}
_FIRST: Final = ("CONTRIBUTING.md", "CHANGELOG.md")


def on_config(config: MkDocsConfig) -> None:
    """Order the pages as the index has them, and build into a folder of the version."""
    config.site_dir = str(Path(config.site_dir) / version())
    # The list of them first.
    decisions = sorted(
        (f"adr/{path.name}" for path in DOCS.glob("adr/*.md")),
        key=lambda name: (name != "adr/README.md", name),
    )
    config.nav = [
        {"kvwire": [{"Start": "index.md"}, *(f"{TREE}/{name}" for name in _FIRST)]},
        *({tab: groups} for tab, groups in tabs((DOCS / "index.md").read_text())),
        {"Decisions": decisions},
    ]


def version() -> str:
    """Return the minor version of this tree."""
    found = _VERSION.search((ROOT / "kvwire" / "__init__.py").read_text())
    assert found, "kvwire/__init__.py has no version"
    return found[1]


def tabs(index: str) -> list[tuple[str, list[Any]]]:
    """Return the tabs of the site, each with its pages or with groups of them.

    ``* **How-to: write it**`` begins the group "Write it" of the tab "How-to".
    """
    found: dict[str, list[Any]] = {}
    pages: list[Any] = []
    seen: set[str] = set()
    for line in index.splitlines():
        if group := _GROUP.match(line):
            pages = found.setdefault(group["tab"] or group["name"], [])
            if group["tab"]:
                below: list[str] = []
                name = group["name"]
                pages.append({name.capitalize() if name.islower() else name: below})
                pages = below
        for _, page in _LINK.findall(line):
            if page.split("/")[0] in _FOLDERS and page not in seen:
                seen.add(page)
                pages.append(page)
    return [(tab, groups) for tab, groups in found.items() if groups]


def on_post_build(config: MkDocsConfig) -> None:
    """List the versions that were built into this folder, and lead to the newest."""
    site = Path(config.site_dir).parent
    built = sorted(
        (path.parent.name for path in site.glob("[0-9]*/index.html")),
        key=lambda name: [int(part) for part in name.split(".")],
        reverse=True,
    )
    versions = [{"version": name, "title": name, "aliases": []} for name in built]
    (site / "versions.json").write_text(json.dumps(versions))
    (site / "index.html").write_text(
        "<!doctype html><title>kvwire</title>"
        f'<meta http-equiv="refresh" content="0; url={built[0]}/index.html">'
    )


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
    led = _led(markdown, source, here)
    if here.parts[0] in _FOLDERS and here.name != _KEYS.name:
        led = with_keys(led, os.path.relpath(_KEYS.relative_to(DOCS), here.parent))
    if page.file.src_uri != "index.md":
        return led
    readme = ROOT / "README.md"
    # What it is, how to install it, and a program.
    first = "\n## ".join(readme.read_text().split("\n## ")[:3])
    index = led.replace("# Documentation\n", "## All pages\n", 1)
    return f"{_led(first, readme, here)}\n{index}"


def _led(markdown: str, source: Path, here: PurePosixPath) -> str:
    """Return a text of a file with links that lead from a page of the site."""

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


def with_keys(markdown: str, page: str) -> str:
    """Lead each key of the configuration, as `handshake_timeout_s`, to its row.

    Keys of one word are no more than words in most places.
    """
    keys = {
        key for key in re.findall(r'<a id="(\w+)">', _KEYS.read_text()) if "_" in key
    }

    def lead(found: re.Match[str]) -> str:
        return f"[{found[0]}]({page}#{found[1]})" if found[1] in keys else found[0]

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [_CODE.sub(lead, part) for part in parts[::2]]
    return "".join(parts)


def plain(text: str) -> str:
    """Write the roles of a docstring as code."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`")
