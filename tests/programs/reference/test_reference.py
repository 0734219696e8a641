"""The pages say what the code says, and the code says it of every public name."""

from __future__ import annotations

import dataclasses
import inspect
import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import kvwire
from kvwire.testing.harness import loopback
from tests.programs.reference import PAGES
from tests.programs.reference.api import names
from tests.programs.reference.docstrings import found, imported
from tests.support.tree import ROOT, sources


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run `make reference`"


def test_every_public_name_has_its_place() -> None:
    """Errors and the configuration have pages of their own."""
    placed = {name.rpartition(".")[2] for name in names()}
    elsewhere = {
        name
        for name in kvwire.__all__
        if inspect.isclass(cls := getattr(kvwire, name))
        and issubclass(cls, kvwire.KVWireError)
    } | {"Config", "__version__"}
    assert set(kvwire.__all__) - elsewhere <= placed


def test_what_guides_import_has_its_place() -> None:
    """Names of kvwire-engines aside: some need torch, and its guide explains them."""
    placed = {name.rpartition(".")[2] for name in names()} | set(kvwire.__all__)
    guides = sources("README.md", "docs/howto/", "docs/topics/", "docs/tutorial/")
    texts = [page.text for page in guides if page.path.endswith(".md")]
    found = {
        name
        for line in re.findall(
            r"^from kvwire(?!_engines)\S* import ([\w, ]+)$",
            "\n".join(texts),
            re.MULTILINE,
        )
        for name in line.split(", ")
    }
    assert {"Arena", "FaultPlan", "HashScheme"} <= found
    assert found <= placed


_IMPORTS = ["import asyncio", "import numpy as np", "import kvwire, kvwire_store"]
_EXAMPLES = {name: one for name, one in names().items() if "```python" in one}


@pytest.mark.parametrize("name", _EXAMPLES)
async def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """With what its page has imported, and the names that the page explains."""
    code = _EXAMPLES[name].partition("```python\n")[2].removesuffix("```")
    lines = [*_IMPORTS, *filter(None, map(imported, names()))]
    lines.append("async def main(a, b, ab, ba, cache, folder):")
    program = tmp_path / "example.py"
    program.write_text("\n".join(lines) + "\n" + textwrap.indent(code, "    "))
    folder = tmp_path / "empty"
    folder.mkdir()

    def cache() -> kvwire.PagedCache:
        layers = [np.zeros((8, 2, 4, 2, 8), np.float16) for _ in range(2)]
        return kvwire.PagedCache.of(layers)

    main = runpy.run_path(str(program))["main"]
    async with loopback() as pair:
        assert await main(pair.a, pair.b, pair.ab, pair.ba, cache, folder) is None


def test_signatures_are_whole() -> None:
    """Options of a transfer one by one, keys of Config with their defaults."""
    text = PAGES["reference/api/connection.md"]()
    assert "Unpack" not in text
    pull = text.partition('<a id="kvwire.Connection.pull">')[2].partition("###")[0]
    assert "    lease_s: float | None = ...,\n" in pull
    text = PAGES["reference/api/connect.md"]()
    assert "Unpack" not in text
    opened = text.partition('<a id="kvwire.open">')[2].partition("## ")[0]
    assert "    lease_s: float = 30.0,\n" in opened


def _has_fields(thing: Any) -> bool:
    struct = isinstance(thing, type) and issubclass(thing, msgspec.Struct)
    return struct or dataclasses.is_dataclass(thing)


_VALUES = [name for name in names() if _has_fields(found(name))]


@pytest.mark.parametrize("name", _VALUES)
def test_each_field_is_described_once(name: str) -> None:
    """So are the arguments with which it is made, which are the same."""
    thing = found(name)
    text = (inspect.getdoc(thing) or "").partition("Attributes:\n")[2]
    section = re.split(r"^(?=\S)", text, flags=re.MULTILINE)[0]
    listed = re.findall(r"^ {4}(\w+(?:, \w+)*): ", section, re.MULTILINE)
    described = [one for names in listed for one in names.split(", ")]
    assert sorted(described) == sorted(inspect.signature(thing).parameters)


def test_only_bytes_have_binary_units() -> None:
    """1024 messages are no KiB of them."""
    rows = [
        line.split(" | ") for line in PAGES["reference/configuration.md"]().splitlines()
    ]
    cells = {row[0].split("`")[1]: row[1:3] for row in rows[2:] if "`" in row[0]}
    for key, texts in cells.items():
        assert key.endswith("_bytes") or "iB" not in "".join(texts), key
    assert cells["window_messages"] == ["`1024`", "1 to 1,048,576"]
    assert cells["chunk_bytes"] == ["`1048576` (1 MiB)", "64 KiB to 16 MiB"]
    assert cells["lease_s"] == ["`30`", "above 0, at most 86,400"]
