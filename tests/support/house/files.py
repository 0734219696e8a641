"""Files: short ones, and pages whose links lead somewhere."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from tests.support.house.check import Check, Finding, each
from tests.support.tree import CODE, ROOT, TESTS, Source, sources

_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


# Projects that set no cap have one file of thousands of lines and never split it.
FILE_LINES_MAX = 800


def long_files(source: Source) -> Iterator[Finding]:
    """A file that has become two."""
    length = len(source.lines)
    if length > FILE_LINES_MAX:
        text = f"{length} lines; {FILE_LINES_MAX} are allowed"
        yield Finding(source.path, length, "file", text)


def dead_links(source: Source) -> Iterator[Finding]:
    """Links to files of the tree that are not there. The web is not asked."""
    for number, line in enumerate(source.lines, 1):
        for target in _LINK.findall(line):
            folder = posixpath.dirname(source.path)
            path = posixpath.normpath(posixpath.join(folder, target))
            if "://" not in target and not _exists(path):
                yield Finding(source.path, number, target, "leads nowhere")


def _exists(path: str) -> bool:
    # In an installed copy the packages lie elsewhere, and are known by their paths.
    return any(s.path == path for s in sources(path)) or (ROOT / path).exists()


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
        ],
        good=[
            ("README.md", "[a](LICENSE), [b](https://a.org/b) and [c](#below)"),
            ("docs/topics/a.md", "[code](../../kvwire/limits.py#L10)"),
        ],
    ),
)
