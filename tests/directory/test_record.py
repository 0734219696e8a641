"""A record is read as it was written, and nothing that is none is believed."""

from __future__ import annotations

import socket
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire import UsageError
from kvwire.directory import ChangeKind, Record, Selector, open_directory
from kvwire.directory.limits import RECORD_BYTES_MAX, RECORD_FIELDS_MAX
from tests.directory.records import found_by, record
from tests.support.names import Zone

TEXT = st.text(st.characters(categories=("L", "N", "P")), max_size=20)


@given(
    role=TEXT,
    model=TEXT,
    load=st.floats(0, 1e9),
    labels=st.dictionaries(TEXT.filter(bool), TEXT, max_size=5),
    transports=st.lists(TEXT.filter(bool), max_size=3),
)
def test_what_is_written_is_read(
    role: str,
    model: str,
    load: float,
    labels: dict[str, str],
    transports: list[str],
) -> None:
    made = record(
        role=role, model=model, load=load, labels=labels, transports=tuple(transports)
    )
    assert Record.decode(made.encode()) == made


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(raw: bytes) -> None:
    with pytest.raises(UsageError):
        Record.decode(raw)


JSON: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 1e300, "", "x", "127.0.0.1:1", [], ["x"], {}]
)


@given(st.dictionaries(st.sampled_from(Record.__struct_fields__), JSON))
def test_a_record_of_wrong_fields_is_refused_or_whole(
    fields: dict[str, object],
) -> None:
    try:
        found = Record.decode(msgspec.json.encode(fields))
    except UsageError:
        return
    assert Record.decode(found.encode()) == found


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ""}, "length >= 1"),
        ({"name": "x" * 200}, "length <= 128"),
        ({"incarnation": "xyz"}, "matching regex"),
        ({"load": -1.0}, ">= 0"),
        ({"lease_s": 0.01}, ">= 0.5"),
        ({"labels": {f"l{i}": "" for i in range(RECORD_FIELDS_MAX + 1)}}, "length <="),
        ({"labels": {f"l{i}": "x" * 120 for i in range(40)}}, "4096 are allowed"),
    ],
)
def test_own_records_are_checked_as_well(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        record(**fields).encode()


def test_numbers_and_texts_of_numpy() -> None:
    made = record(load=np.float32(0.5), lease_s=np.int64(5), labels={"a": np.str_("b")})
    assert Record.decode(made.encode()) == record(
        load=0.5, lease_s=5.0, labels={"a": "b"}
    )
    with pytest.raises(UsageError, match="not an object"):
        record(load=object()).encode()


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\u202eb"])
def test_a_record_prints(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be printed"):
        record(name=name)


def test_an_address_has_a_port() -> None:
    with pytest.raises(UsageError, match="no port"):
        record(address="tcp://host")


def test_a_later_version_may_say_more() -> None:
    fields = msgspec.json.decode(record().encode()) | {"colour": ["blue"]}
    assert Record.decode(msgspec.json.encode(fields)) == record()


def test_the_largest_record_is_read_and_a_larger_one_is_not() -> None:
    fields = msgspec.json.decode(record().encode()) | {"more": ""}
    fields["more"] = "x" * (RECORD_BYTES_MAX - len(msgspec.json.encode(fields)))
    assert Record.decode(msgspec.json.encode(fields)) == record()
    fields["more"] += "x"
    with pytest.raises(UsageError, match="4097 bytes"):
        Record.decode(msgspec.json.encode(fields))


def test_the_key_is_the_incarnation_or_else_the_address() -> None:
    assert record(1).key == f"{1:032x}"
    assert record(1, incarnation="").key == "tcp://127.0.0.1:7001"


# --- A selector means who says of itself all that it asks for -------------------------


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


# --- A name and its addresses, as a resolver says them --------------------------------


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_addresses_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    zone = Zone(monkeypatch, "10.0.0.1", "10.0.0.3", "10.0.0.1")
    directory = open_directory(
        "dns://decode.svc:7400?role=decode&model=m&interval_s=0.2"
    )
    found = await directory.members("role=decode,model=m")
    addresses = {record.address for record in found}
    assert addresses == {"tcp://10.0.0.1:7400", "tcp://10.0.0.3:7400"}
    async with aclosing(directory.watch()) as changes:
        joined = {(await anext(changes)).record.name for _ in range(2)}
        assert joined == {"10.0.0.1", "10.0.0.3"}
        zone.hosts = ["10.0.0.1", "10.0.0.2"]
        change = await anext(changes)
        assert (change.kind, change.record.name) == (ChangeKind.JOINED, "10.0.0.2")
        # After three answers without it.
        asked = zone.asked
        change = await anext(changes)
        assert (change.kind, change.record.name) == (ChangeKind.LEFT, "10.0.0.3")
        assert zone.asked - asked <= 3
    await directory.close()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_members_with_two_addresses_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zone = Zone(monkeypatch, "::1", "fd00::2", "127.0.0.1", "127.0.0.2")
    directory = open_directory("dns://decode.svc:7400?interval_s=0.2")
    async with aclosing(directory.watch()) as changes:
        joined = {(await anext(changes)).record.name for _ in range(2)}
        assert joined == {"127.0.0.1", "127.0.0.2"}
        # An answer of one family is incomplete; by the third, the addresses are gone.
        asked, zone.hosts = zone.asked, ["::1"]
        change = await anext(changes)
        assert (change.kind, change.record.name) == (ChangeKind.JOINED, "::1")
        assert zone.asked - asked >= 3
    await directory.close()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_nobody_and_no_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    zone, directory = Zone(monkeypatch), open_directory("dns://decode.svc:7400")
    zone.error = socket.EAI_NONAME
    assert await directory.members() == ()
    zone.error = socket.EAI_AGAIN
    with pytest.raises(OSError, match="said so"):
        await directory.members()
    await directory.close()


async def test_a_peer_by_a_name() -> None:
    where = "dns://localhost:{port}?role=decode"
    name, refused = await found_by(where)
    assert name == "far"
    assert "the zone's owner" in refused


@pytest.mark.parametrize(
    "url",
    [
        "dns:",
        "dns://name",
        "dns://:7400",
        "dns://name:7400?interval_s=0.01",
        "dns://name:7400?interval_s=5000",
        "dns://name:7400?role=%0A",
        "k8s:",
        "k8s://service:7400?api=http://a",
        "k8s://service.namespace?api=http://a",
        "k8s://service.namespace:7400?api=ftp://a",
        "k8s://service.namespace:7400?api=http://a&interval_s=0.01",
    ],
)
def test_what_is_no_name_and_no_service(url: str) -> None:
    with pytest.raises(UsageError):
        open_directory(url)
