"""The protocol pages say what the code says, where both have a table."""

from __future__ import annotations

import re

from msgspec import inspect

from kvwire import limits
from kvwire.backend import API_VERSION
from kvwire.errors import WireCode
from kvwire.kv.blocks import DEFAULT_GROUP
from kvwire.kv.layout import AXES
from kvwire.kv.spec import (
    DTYPE_BYTES,
    KV_HEAD_DIM_MAX,
    KV_HEADS_MAX,
    KV_SHARDS_MAX,
    KVSpec,
)
from kvwire.proto.auth import Keys
from kvwire.security import keys
from kvwire.transfers.incoming import SEGMENT_BYTES_MAX
from kvwire.transfers.offer import TRACE_BYTES, TransferOffer
from kvwire.types import Role
from kvwire.wire.control import _BODIES
from kvwire.wire.header import _BODY_BYTES, FIRST_PAYLOAD_TYPE, FrameType
from tests.support.tree import ROOT

PAGES = ("protocol.md", "protocol-kv-transfers.md")
PAGE = "".join((ROOT / "docs" / "topics" / name).read_text() for name in PAGES)


def rows(*columns: str) -> list[tuple[str, ...]]:
    """The rows of all tables whose cells match these patterns, in their order."""
    pattern = r"^\| *" + r" *\| *".join(f"({column})" for column in columns) + r" *\|"
    return re.findall(pattern, PAGE, re.MULTILINE)


def table(*headings: str) -> list[list[str]]:
    """The cells of the table that begins with these headings."""
    begin = re.escape("| " + " | ".join(headings) + " |")
    pattern = rf"^{begin}.*\n\|-.*\n((?:\|.*\n)+)"
    (found,) = re.findall(pattern, PAGE, re.MULTILINE)
    lines = found.splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def number(text: str) -> int:
    return int(text.replace(",", ""), 0)


def test_the_table_of_frames() -> None:
    """Every type with its number, its kind of body and its bounds."""
    found = rows(r"0x[0-9a-f]{2}", r"[A-Z]+(?:_[A-Z]+)*", r"\w+", r"[\d,]+", r"[\d,]+")
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
        for names, text in rows(r"[A-Z_]+(?:, [A-Z_]+)?", r"[^|]*[a-z][^|]*")
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


def test_the_table_of_a_description() -> None:
    """Every field in its order, those with a default, and how many there may be."""
    kind = inspect.type_info(TransferOffer)
    assert isinstance(kind, inspect.StructType)
    described = table("description", "type")
    assert [name for name, *_ in described] == [field.name for field in kind.fields]
    optional = [name for name, _, default, _ in described if default]
    assert optional == [field.name for field in kind.fields if not field.required]
    types = " ".join(text for _, text, *_ in described)
    assert [number(text) for text in re.findall(r"[\d,]*\d", types)] == [
        *(1, limits.KV_GROUPS_MAX, 8, 8, 32, limits.KV_GROUPS_MAX),
        *(limits.LANDED_BOXES_MAX, 0, 2, 32, 1, 16, TRACE_BYTES),
    ]


def test_the_table_of_a_group() -> None:
    """As a geometry has them."""
    described = {name: text for name, text, _ in table("group", "type")}
    assert list(described) == ["name", "spec", "order", "blocks", "tokens"]
    assert f"1 to {limits.NAME_CHARS_MAX} characters" in described["name"]
    assert f"at most {limits.PROFILE_FIELDS_MAX} " in described["spec"]
    assert described["blocks"] == f"0 to {limits.KV_BLOCKS_MAX:,}"
    assert f"`{' '.join(AXES)}`" in PAGE
    assert f"cache without groups `{DEFAULT_GROUP}`" in PAGE


def test_the_table_of_a_spec() -> None:
    """Every name that travels, and how far its value goes."""
    described = {name: text for name, text, _ in table("spec", "value")}
    spec = KVSpec(
        layers=1,
        kv_heads=1,
        head_dim=1,
        block_tokens=1,
        components=1,
        dtype="uint8",
        kind="state",
    )
    assert sorted(described) == sorted(name for name, _ in spec.to_pairs())
    most = {
        "layers": limits.KV_LAYERS_MAX,
        "kv_heads": KV_HEADS_MAX,
        "head_dim": KV_HEAD_DIM_MAX,
        "block_tokens": limits.KV_BLOCK_TOKENS_MAX,
        "components": 2,
        "shard_rank": KV_SHARDS_MAX - 1,
        "shard_size": KV_SHARDS_MAX,
        "model_kv_heads": KV_HEADS_MAX,
        "first_layer": limits.KV_LAYERS_MAX,
        "model_layers": limits.KV_LAYERS_MAX,
    }
    for name, bound in most.items():
        least = 0 if name in ("shard_rank", "first_layer") else 1
        assert described[name] == f"{least} to {bound:,}"
    assert {described["dtype"], described["fingerprint"]} == {"text"}
    ((*_, types),) = rows("dtype", "text", "[^|]*")
    assert set(re.findall(r"`(\w+)`", types)) == set(DTYPE_BYTES)


def test_limits_in_the_text() -> None:
    """Each number that a peer has to keep is the one of limits.py."""
    text = " ".join(PAGE.split())
    for said in (
        f'offers `[["tcp", {API_VERSION}]]`',
        f"pre-shared key ({keys.PSK_BYTES_MIN} to {keys.PSK_BYTES_MAX:,} bytes)",
        f"at most {limits.SEGMENTS_MAX:,}), its *box*",
        f"At most {limits.SETTLED_MAX:,} of them fit",
        f"has more than {limits.KV_PIECES_MAX:,} pieces",
        f"more than one for each {limits.KV_PIECE_BYTES} bytes",
        f"at most {limits.REQUEST_BYTES_MAX // limits.GIB} GiB",
        f"has at most {SEGMENT_BYTES_MAX // limits.MIB} MiB",
        f"at about {limits.SEGMENT_BYTES // limits.MIB} MiB",
        f"At most {limits.TRANSFERS_WAITING_MAX:,} transfers",
        f"at most {limits.DESCRIPTION_BYTES_MAX // limits.KIB} KiB",
    ):
        assert said in text, said
