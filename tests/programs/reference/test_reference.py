"""docs/reference says what the code says, and the code says it of every public name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvwire
from tests.programs.reference import FOLDER, PAGES
from tests.programs.reference.api import TOPICS
from tests.programs.reference.docstrings import found
from tests.programs.reference.examples import ELSEWHERE, EXAMPLES, expect_runs


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make reference`"


def test_every_public_name_has_its_place() -> None:
    """Errors and the configuration have pages of their own."""
    named = [name for topic in TOPICS for name in topic.names]
    assert len(named) == len(set(named))
    placed = {name.rpartition(".")[2] for name in named}
    elsewhere = {
        name
        for name in kvwire.__all__
        if inspect.isclass(cls := getattr(kvwire, name))
        and issubclass(cls, kvwire.KVWireError)
    } | {"Config", "__version__"}
    assert set(kvwire.__all__) - elsewhere <= placed


def test_every_name_has_an_example() -> None:
    named = {name for topic in TOPICS for name in topic.names}
    assert named == {*EXAMPLES, *ELSEWHERE}


@pytest.mark.parametrize("name", {one: name for name, one in EXAMPLES.items()}.values())
async def test_an_example_runs(name: str, tmp_path: Path) -> None:
    await expect_runs(name, tmp_path)


def test_signatures_are_whole() -> None:
    """Options of a transfer one by one, keys of Config with their defaults."""
    text = PAGES["api/connection.md"]()
    assert "Unpack" not in text
    pull = text.partition('<a id="kvwire.Connection.pull">')[2].partition("###")[0]
    assert "    lease_s: float | None = ...,\n" in pull
    text = PAGES["api/connect.md"]()
    assert "Unpack" not in text
    opened = text.partition('<a id="kvwire.open">')[2].partition("## ")[0]
    assert "    lease_s: float = 30.0,\n" in opened


def _has_fields(thing: Any) -> bool:
    struct = isinstance(thing, type) and issubclass(thing, msgspec.Struct)
    return struct or dataclasses.is_dataclass(thing)


_VALUES = [name for topic in TOPICS for name in topic.names if _has_fields(found(name))]


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
    rows = [line.split(" | ") for line in PAGES["configuration.md"]().splitlines()]
    cells = {row[0].split("`")[1]: row[1:3] for row in rows[2:] if "`" in row[0]}
    for key, texts in cells.items():
        assert key.endswith("_bytes") or "iB" not in "".join(texts), key
    assert cells["window_messages"] == ["`1024`", "1 to 1,048,576"]
    assert cells["chunk_bytes"] == ["`1048576` (1 MiB)", "64 KiB to 16 MiB"]
    assert cells["lease_s"] == ["`30`", "above 0, at most 86,400"]
