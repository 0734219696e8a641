"""The Python in README.md and docs/ runs as written, warnings being errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tree import Source, sources

_FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What asyncio's debug mode says of a callback on a busy machine: time, no warning.
_SLOW_CALLBACK = re.compile(r"^Executing .* took [0-9.]+ seconds\n", re.MULTILINE)
# Longer than any example, shorter than pytest's own limit.
_TIMEOUT_S = 15


def programs(page: Source) -> list[tuple[int, str]]:
    """The line and text of each block that is a whole program: one that imports."""
    return [
        (page.text.count("\n", 0, block.start(1)) + 1, block[1])
        for block in _FENCE.finditer(page.text)
        if re.match(r"(?:import|from) ", block[1])
    ]


_PAGES = [
    page
    for page in sources("README.md", "docs/tutorial/", "docs/howto/")
    if page.path.endswith(".md")
]
_PROGRAMS = [
    pytest.param(text, id=f"{page.path}:{line}")
    for page in _PAGES
    for line, text in programs(page)
]


@pytest.mark.parametrize("text", _PROGRAMS)
def test_the_program_runs(text: str, tmp_path: Path) -> None:
    """What a reader pastes into a file does what the page says."""
    file = tmp_path / "example.py"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", str(file)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not _SLOW_CALLBACK.sub("", done.stderr)
    assert done.stdout == expected_output(text)


def expected_output(program: str) -> str:
    """What the ``# prints`` comments of a program promise, line by line."""
    return "".join(
        f"{line}\n" for line in re.findall(r"# prints (.*)$", program, re.MULTILINE)
    )


def test_the_readme_has_a_program() -> None:
    """Otherwise the test above runs nothing."""
    assert any(page.path == "README.md" and programs(page) for page in _PAGES)


def test_fragments_are_told_from_programs() -> None:
    """A block that imports nothing shows a few lines and is not run."""
    page = Source("README.md", "x\n```python\nimport a\n```\n```python\nf()\n```\n")
    assert programs(page) == [(3, "import a\n")]
    assert expected_output("print(1)  # prints 1\nprint(2)\n") == "1\n"
