"""Messages between a store server and its clients: what is let in, and what is not.

What is made of any bytes is in tests/programs/fuzz.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvwire import UsageError
from kvwire_store.keys import as_keys
from kvwire_store.limits import (
    STORE_HASH_BYTES_MAX,
    STORE_KEYS_MAX,
    STORE_REQUEST_BYTES_MAX,
)
from kvwire_store.namespace import DIGEST_BYTES, ORDERS, Namespace
from kvwire_store.placement import BlockState
from kvwire_store.server import messages
from tests.support.caches import STORED as SPEC
from tests.support.caches import chain

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
