"""A selector means who says of itself all that it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from kvwire import UsageError
from kvwire.directory import Selector
from tests.directory.records import record

MEMBER = record(
    1,
    name="decode-0",
    role="decode",
    model="demo",
    specs={"full": "abc", "window": "def"},
    transports=("tcp", "ucx"),
    labels={"zone": "a"},
)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", True),
        ("  ", True),
        ("role=decode", True),
        (" role = decode , model = demo ", True),
        ("role=prefill", False),
        ("role=decode,model=other", False),
        ("name=decode-0", True),
        ("transport=ucx", True),
        ("transport=nccl", False),
        ("spec=def", True),
        ("spec=full", False),
        ("zone=a", True),
        ("zone=b", False),
        ("rack=1", False),
        (f"incarnation={1:032x}", True),
        ("address=tcp://127.0.0.1:7001", True),
    ],
)
def test_who_is_meant(text: str, meant: bool) -> None:
    assert Selector.parse(text).matches(MEMBER) is meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("decode", "not a valid term"),
        ("role=decode,", "not a valid term"),
        ("=decode", "not a valid term"),
        ("role=a,role=b", "twice"),
        ("x" * 2000, "2000 characters"),
        (",".join(f"k{i}=1" for i in range(65)), "65 terms"),
        (None, "selector: pass a text, not a NoneType"),
        (MEMBER, "selector: pass a text, not a Record"),
    ],
)
def test_what_is_no_selector(text: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Selector.parse(text)


def test_a_selector_is_its_text() -> None:
    selector = Selector.parse("role=decode, zone=a")
    assert str(selector) == "role=decode,zone=a"
    assert Selector.parse(str(selector)) == selector
    assert Selector.parse(selector) is selector
