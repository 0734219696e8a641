"""Messages between a store server and its clients: what is let in, and what is not.

What is made of any bytes is in tests/programs/fuzz.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import inspect

from kvwire import UsageError, limits
from kvwire.limits import KIB, MIB
from kvwire_store.keys import as_keys
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
from kvwire_store.namespace import ABSENT, DIGEST_BYTES, ORDERS, Namespace
from kvwire_store.placement import BlockState
from kvwire_store.server import messages
from kvwire_store.tiers.base import BlockResult
from tests.support.caches import STORED as SPEC
from tests.support.caches import chain
from tests.support.tree import ROOT

NAMESPACE = Namespace("kv", SPEC)
NAMES = messages.Names.of(as_keys(NAMESPACE.digest + one for one in chain(3)))


def moving(
    kind: type[messages.Put | messages.Get], **changes: Any
) -> messages.Put | messages.Get:
    fields: dict[str, Any] = {
        "number": 7,
        "namespace": messages.text_of(NAMESPACE),
        "names": NAMES,
        "timeout_ms": 1000,
    }
    if kind is messages.Put:
        fields["order"] = 3
    return kind(**fields | changes)


def decoded(body: bytes) -> Namespace:
    """Read a put as a server does: the message, and then its namespace."""
    put = messages.decode_request(body)
    assert isinstance(put, messages.Put)
    return messages.namespace_in(put.namespace)


REQUESTS: list[messages.AnyRequest] = [
    messages.StoreHello(1, 2),
    messages.Find(1, NAMES),
    messages.Touch(NAMES),
    moving(messages.Put),
    moving(messages.Get),
    messages.Flush(2),
    messages.Stats(3),
    messages.Delete(4, NAMES),
    messages.Delete(5, None, NAMESPACE.digest, "x"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_a_request_is_read_as_it_was_written(request_: messages.AnyRequest) -> None:
    assert messages.decode_request(messages.encode(request_)) == request_


def test_keys_and_space_come_through() -> None:
    put = messages.decode_request(messages.encode(moving(messages.Put)))
    assert isinstance(put, messages.Put)
    assert [key[DIGEST_BYTES:] for key in put.names.keys_of("")] == chain(3)
    assert messages.namespace_in(put.namespace) == NAMESPACE
    assert put.names.all_in(NAMESPACE)


def test_a_space_that_is_longer_than_any_is_not_remembered() -> None:
    """Later versions may add fields; what is added is kept with the rest."""
    fields = ("kv", SPEC.to_pairs(), "")
    longer = msgspec.Raw(msgspec.msgpack.encode((*fields, bytes(KIB))))
    assert messages.namespace_in(longer) == NAMESPACE
    too_long = msgspec.Raw(msgspec.msgpack.encode((*fields, bytes(MIB))))
    with pytest.raises(UsageError, match="its namespace has 10487"):
        messages.namespace_in(too_long)


def test_keys_with_zeros_at_their_ends_keep_them() -> None:
    keys = [NAMESPACE.digest + bytes(4), NAMESPACE.digest + b"a\0\0\0"]
    assert messages.Names.of(as_keys(keys)).keys_of("").tolist() == keys


@pytest.mark.parametrize(
    "changes",
    [
        {"order": len(ORDERS)},
        {"order": -1},
        {"timeout_ms": 0},
        {"timeout_ms": 10**9},
        {"number": -1},
        {"number": 2**63},
        {"names": [DIGEST_BYTES, bytes(DIGEST_BYTES)]},
        {"names": [48, bytes(47)]},
        {"names": [48, b""]},
        {"names": [48, bytes(48 * (STORE_KEYS_MAX + 1))]},
        {"names": [DIGEST_BYTES + STORE_HASH_BYTES_MAX + 1, bytes(81)]},
        {"names": [0, bytes(48)]},
        {"namespace": ["", []]},
        {"namespace": ["x" * 129, []]},
        {"namespace": ["kv", [["layers", "1"]] * 65]},
        {"namespace": ["kv", [["layers", {"deep": 1}]]]},
    ],
    ids=str,
)
def test_a_field_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    fields = msgspec.msgpack.decode(messages.encode(moving(messages.Put)))
    names = ["tag", *messages.Put.__struct_fields__]
    for name, value in changes.items():
        fields[names.index(name)] = value
    with pytest.raises(UsageError, match="not a request"):
        decoded(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "fields",
    [
        [2, 1, bytes([len(ORDERS)])],
        [2, 1, bytes(STORE_KEYS_MAX + 1)],
        [3, 1, b"\xff", ""],
        [3, 1, b"\0", "x" * 201],
        [3, 1, b"\0", "", bytes([len(ORDERS)])],
        [1, 1, False, False, 10**6],
        [5, 1, bytes([5]), bytes(1)],
        [5, 1, bytes(1), bytes([1])],
        [5, 1, bytes(2), bytes(1)],
        [9, 1],
    ],
    ids=str,
)
def test_a_reply_out_of_range_is_refused(fields: list[Any]) -> None:
    with pytest.raises(UsageError, match="not a reply"):
        messages.decode_reply(msgspec.msgpack.encode(fields))


def test_an_answer_has_what_it_was_made_of() -> None:
    reply = messages.VerbDone(1, bytes([0, 4]), bytes([0, 1]), ("why",))
    told = messages.decode_reply(messages.encode(reply))
    assert isinstance(told, messages.VerbDone)
    placement = told.placement
    assert placement.states.tolist() == [BlockState.DONE, BlockState.MISSING]
    assert placement.reason(1) == "why"
    assert messages.VerbDone.of(1, placement) == reply


def test_the_largest_request_fits_its_limit() -> None:
    longest = bytes(DIGEST_BYTES + STORE_HASH_BYTES_MAX)
    text = tuple((f"{i:0128d}", "x" * 128) for i in range(64))
    put = moving(
        messages.Put,
        names=messages.Names(len(longest), longest * STORE_KEYS_MAX),
        namespace=msgspec.Raw(
            msgspec.msgpack.encode(messages.NamespaceText("x" * 128, text))
        ),
        number=2**63 - 1,
    )
    assert len(messages.encode(put)) <= STORE_REQUEST_BYTES_MAX


def test_a_long_reason_is_cut() -> None:
    assert (
        len(messages.StoreDone.of(1, np.zeros(1, np.uint8), "x" * 1000).reason) == 200
    )


def test_a_text_that_is_no_text_is_refused() -> None:
    body = messages.encode(moving(messages.Put)).replace(b"layers", b"l\xffyers")
    with pytest.raises(UsageError, match="not a request"):
        decoded(body)
    with pytest.raises(UsageError, match="not a reply"):
        messages.decode_reply(
            messages.encode(messages.StoreDone(1, b"\1", "why")).replace(
                b"why", b"\xffhy"
            )
        )


def test_what_a_newer_version_has_more_is_skipped_unless_it_is_too_deep() -> None:
    newer = [*msgspec.to_builtins(messages.Flush(2)), "more"]
    assert messages.decode_request(msgspec.msgpack.encode(newer)) == messages.Flush(2)
    deep = b"\x93\x06\x02" + b"\x91" * 100_000
    with pytest.raises(UsageError, match="not a request"):
        messages.decode_request(deep)


# --- the page of the protocol ---------------------------------------------------------


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
