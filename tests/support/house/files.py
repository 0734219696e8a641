"""Files: short ones, and pages whose links lead somewhere."""

from __future__ import annotations

import functools
import posixpath
import re
from collections import Counter
from collections.abc import Iterator

from tests.support.house.check import Check, Finding, each
from tests.support.tree import CODE, ROOT, TESTS, Source, sources

_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


# Projects that set no cap have one file of thousands of lines and never split it.
FILE_LINES_MAX = 800


def long_files(source: Source) -> Iterator[Finding]:
    """A file that has become two."""
    length = len(source.lines)
    if length > FILE_LINES_MAX:
        text = f"{length} lines; {FILE_LINES_MAX} are allowed"
        yield Finding(source.path, length, "file", text)


def dead_links(source: Source) -> Iterator[Finding]:
    """Links to files and headings that are not there. The web is not asked."""
    folder = posixpath.dirname(source.path)
    for number, line in enumerate(source.lines, 1):
        for target, anchor in _LINK.findall(line):
            path = posixpath.normpath(posixpath.join(folder, target))
            page = source if not target else _page(path)
            if "://" in target or (not target and not anchor):
                continue
            if page is None and not (ROOT / path).exists():
                yield Finding(source.path, number, target, "leads nowhere")
            elif page and page.path.endswith(".md") and anchor not in _anchors(page):
                yield Finding(source.path, number, f"{target}#{anchor}", "no heading")


def _page(path: str) -> Source | None:
    # In an installed copy the packages lie elsewhere, and are known by their paths.
    return next((s for s in sources(path) if s.path == path), None)


@functools.cache
def _anchors(page: Source) -> frozenset[str]:
    """Anchors that a repository's host makes of a page, and "" for the page itself."""
    text = re.sub(r"^```.*?^```$", "", page.text, flags=re.MULTILINE | re.DOTALL)
    found = {"", *re.findall(r'<a id="([^"]+)"', text)}
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        shown = re.sub(r"<[^>]+>|\]\([^)]*\)", "", heading).strip().lower()
        made = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(f"{made}-{seen[made]}" if seen[made] else made)
        seen[made] += 1
    return frozenset(found)


CHECKS = (
    Check(
        name="files are short",
        over=(
            *CODE,
            *TESTS,
            "conftest.py",
            "examples/",
            "docs/",
            "README.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
        ),
        suffixes=(".py", ".md"),
        find=each(long_files),
        bad=[("a.py", "x = 1\n" * (FILE_LINES_MAX + 1))],
        good=[("a.py", "x = 1\n" * FILE_LINES_MAX)],
    ),
    Check(
        name="links lead somewhere",
        over=("",),
        suffixes=(".md",),
        find=each(dead_links),
        bad=[
            ("README.md", "See [this](docs/no-such-page.md)."),
            ("docs/topics/a.md", "![picture](img/no-such-picture.svg)"),
            ("docs/topics/a.md", "Up [one too few](../README.md#start)."),
            ("README.md", "[above](#such-a-heading)\n```\n# Such a heading\n```"),
            ("README.md", "[a page](CONTRIBUTING.md#no-such-heading)"),
        ],
        good=[
            (
                "README.md",
                "[a](LICENSE), [b](https://a.org/b), [c](#see-below)\n# See `below`",
            ),
            ("README.md", "[a page](CONTRIBUTING.md#house-style)"),
            ("docs/topics/a.md", "[code](../../kvwire/limits.py#L10)"),
        ],
    ),
)
