"""docs/topics/protocol-store.md says what the messages are."""

from __future__ import annotations

import re

import pytest
from msgspec import inspect

from kvwire import limits
from kvwire_store.limits import (
    STORE_HASH_BYTES_MAX,
    STORE_HELD_BYTES,
    STORE_INLINE_BYTES,
    STORE_KEYS_MAX,
    STORE_NAMESPACES_MAX,
    STORE_NAMESPACES_TOLD,
    STORE_REQUEST_BYTES_MAX,
    STORE_REQUESTS_MAX,
    STORE_TIMEOUT_S_MAX,
)
from kvwire_store.namespace import ABSENT, ORDERS, Namespace
from kvwire_store.server import messages
from kvwire_store.tiers.base import BlockResult
from tests.support.caches import STORED as SPEC
from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "topics" / "protocol-store.md").read_text()


def listed(heading: str) -> dict[int, tuple[str, list[str]]]:
    """The messages of one table: name and fields, by number."""
    (part,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
    rows = re.findall(r"^\| (\d+) \| (\w+) \| ([^|]+) \|", part, re.MULTILINE)
    return {
        int(number): (name, said.strip().split(", ")) for number, name, said in rows
    }


@pytest.mark.parametrize(
    ("heading", "union"),
    [("From the client", messages.AnyRequest), ("From the server", messages.AnyReply)],
)
def test_every_message_has_its_number_and_its_fields(
    heading: str, union: object
) -> None:
    kinds = inspect.type_info(union)
    assert isinstance(kinds, inspect.UnionType)
    known = {}
    for kind in kinds.types:
        assert isinstance(kind, inspect.StructType)
        fields = [one.name for one in kind.fields]
        known[kind.tag] = (kind.cls.__name__, fields)
    assert listed(heading) == known


def test_the_version_the_tag_and_the_results() -> None:
    assert messages.VERSIONS == (1, 1)
    assert "This page is version 1." in PAGE
    assert f"tag {messages.TAG:#x}" in PAGE
    results = re.findall(r"^\| (\d) \| ([A-Z]+) \|", PAGE, re.MULTILINE)
    assert results == [(str(int(one)), one.name) for one in BlockResult]


def test_the_digests_of_the_example() -> None:
    for namespace in (Namespace("kv", SPEC), Namespace("kv", SPEC, "acme")):
        assert f"`{namespace.digest.hex()}`" in PAGE
    assert f"`{(('kv', SPEC.to_pairs()))!r}`" in PAGE


def test_orders_are_numbered_as_it_says() -> None:
    assert f"one of {len(ORDERS)} *orders*" in PAGE
    assert ORDERS[0] == ("layer", "kv", "token", "head", "dim")
    assert ORDERS[1] == ("layer", "kv", "token", "dim", "head")
    assert ORDERS[-1] == ORDERS[0][::-1]
    assert f"{ABSENT} means that the block does not exist" in " ".join(PAGE.split())


def test_limits_in_the_text() -> None:
    text = " ".join(PAGE.split())
    for said in (
        f"at most {STORE_REQUEST_BYTES_MAX:,} bytes",
        f"1 to {STORE_HASH_BYTES_MAX} bytes of a hash",
        f"1 to {STORE_KEYS_MAX:,} keys in a row",
        f"at most {STORE_INLINE_BYTES:,} bytes, they are",
        f"1 to {int(STORE_TIMEOUT_S_MAX * 1000):,}: after",
        f"at most {STORE_REQUESTS_MAX} open requests",
        f"(at most {STORE_NAMESPACES_TOLD}, for",
        f"the {STORE_NAMESPACES_MAX:,} that it keeps",
        f"text of at most {limits.REASON_CHARS_MAX} characters",
        f"beyond {STORE_HELD_BYTES // limits.MIB} MiB",
    ):
        assert said in text, said
