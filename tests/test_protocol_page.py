"""docs/topics/protocol.md says what the code says, where both have a table."""

from __future__ import annotations

import re

from msgspec import inspect

from kvwire.errors import WireCode
from kvwire.proto.auth import Keys
from kvwire.types import Role
from kvwire.wire.control import _BODIES
from kvwire.wire.header import _BODY_BYTES, FIRST_PAYLOAD_TYPE, FrameType
from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "topics" / "protocol.md").read_text()


def rows(*columns: str) -> list[tuple[str, ...]]:
    """The rows of all tables whose cells match these patterns, in their order."""
    pattern = r"^\| *" + r" *\| *".join(f"({column})" for column in columns) + r" *\|"
    return re.findall(pattern, PAGE, re.MULTILINE)


def number(text: str) -> int:
    return int(text.replace(",", ""), 0)


def test_the_table_of_frames() -> None:
    """Every type with its number, its kind of body and its bounds."""
    found = rows(r"0x[0-9a-f]{2}", r"[A-Z]+", r"\w+", r"[\d,]+", r"[\d,]+")
    described = {
        number(value): (name, kind, number(low), number(high))
        for value, name, kind, low, high in found
    }
    assert len(described) == len(found)
    for frame_type in FrameType:
        kind = "payload" if frame_type >= FIRST_PAYLOAD_TYPE else "control"
        if frame_type <= FrameType.REFUSE:
            kind = "fixed"
        low, high = _BODY_BYTES[frame_type]
        assert described.pop(frame_type) == (frame_type.name, kind, low, high)
    assert not described


def test_the_table_of_codes() -> None:
    """Every code but OK, which is never sent."""
    described = {
        int(value): name for value, name in rows(r"\d+", r"[A-Z]+(?:_[A-Z]+)*")
    }
    assert described == {int(c): c.name for c in WireCode if c is not WireCode.OK}


def test_the_table_of_control_bodies() -> None:
    """Every body, with as many fields as it has."""
    described = {
        name: text
        for names, text in rows(r"[A-Z]+(?:, [A-Z]+)?", r"[^|]*[a-z][^|]*")
        for name in names.split(", ")
    }
    for frame_type, body in _BODIES.items():
        kind = inspect.type_info(body)
        assert isinstance(kind, inspect.StructType)
        text = re.sub(r"\([^)]*\)", "", described[FrameType(frame_type).name])
        depth, fields = 0, 1
        for letter in text:
            depth += (letter == "[") - (letter == "]")
            fields += letter == "," and not depth
        assert fields == len(kind.fields), FrameType(frame_type).name


def test_the_labels_of_keys() -> None:
    """One for each key that is derived."""
    labels = set(
        re.findall(
            r"`kvwire ((?:server|client) proof|\w+ (?:client|server)|lane)`", PAGE
        )
    )
    keys = Keys.derive(b"", bytes(32), bytes(32))
    assert len(labels) == 2 + len(keys.seal) + len(keys.grant) + len([keys.lane])
    assert {f"seal {role.name.lower()}" for role in Role} <= labels
