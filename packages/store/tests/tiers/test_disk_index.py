"""The index of a disk tier: rows that are all there or not at all, and namespaces."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire import UsageError
from kvwire.limits import KIB, NAME_CHARS_MAX
from kvwire_store.limits import STORE_NAMESPACES_MAX
from kvwire_store.namespace import ORDERS, Namespace
from kvwire_store.tiers.disk_index import FORMAT, DiskIndex, DiskRows
from packages.store.tests.tiers.test_directory import rows
from tests.support.caches import STORED as SPEC
from tests.support.depth import examples

SLAB = 64 * KIB
NONE = np.empty(0, np.int64)
NAMESPACE = Namespace("kv", SPEC)


@contextmanager
def opened(path: Path, *, in_order: bool = True) -> Iterator[DiskIndex]:
    index = DiskIndex(path / "index", SLAB, synced=False)
    try:
        yield index
    finally:
        index.close(in_order=in_order)


def slots_in(index: DiskIndex) -> list[int]:
    return [slot for some in index.rows() for slot in some.slots.tolist()]


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path / "index", isolation_level=None)) as db:
        db.execute(statement, values)


def test_rows_are_found_again(tmp_path: Path) -> None:
    told = rows(3, 1, 40)._replace(
        sums=np.array([0, 2**63, 2**64 - 1], np.uint64),
        orders=np.array([0, 7, len(ORDERS) - 1], np.uint8),
    )
    with opened(tmp_path) as index:
        index.record(NAMESPACE, told, NONE)
    with opened(tmp_path) as index:
        (found,) = index.rows()
    expected = told.selected(np.array([1, 0, 2]))
    for name in DiskRows._fields:
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


def test_a_slot_has_one_row(tmp_path: Path) -> None:
    with opened(tmp_path) as index:
        index.record(NAMESPACE, rows(1, 2, 3), NONE)
        index.record(NAMESPACE, rows(2, 3, 4), NONE)
        assert slots_in(index) == [1, 2, 3, 4]
        index.erase([range(2, 3), range(4, 9)])
        assert slots_in(index) == [1, 3]


def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as index:
        index.record(NAMESPACE, rows(1), NONE)
        other = Namespace("other", SPEC)
        bad = rows(5, 6)._replace(keys=np.array([b"k" * 20, None], object))
        _expect_failure(index, other, bad)
        assert slots_in(index) == [1]
        assert set(index.namespaces) == {NAMESPACE.digest}
        index.record(other, rows(5), NONE)
    with opened(tmp_path) as index:
        assert slots_in(index) == [1, 5]
        assert set(index.namespaces) == {NAMESPACE.digest, other.digest}


def _expect_failure(index: DiskIndex, namespace: Namespace, told: DiskRows) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        index.record(namespace, told, NONE)


def test_it_knows_whether_it_was_closed_in_order(tmp_path: Path) -> None:
    with opened(tmp_path, in_order=False) as index:
        assert index.closed
    # Nothing was written meanwhile.
    with opened(tmp_path, in_order=False) as index:
        assert index.closed
        index.dirty()
        _expect_open(index)
    with opened(tmp_path, in_order=True) as index:
        assert not index.closed
    with opened(tmp_path) as index:
        assert index.closed
        index.erase([range(1)])
        _expect_open(index)


def _expect_open(index: DiskIndex) -> None:
    assert not index.closed


def test_a_later_format_and_another_database_are_refused(
    tmp_path: Path,
) -> None:
    for statement, found in (
        ("CREATE TABLE theirs (one)", 0),
        (f"PRAGMA user_version={FORMAT + 1}", FORMAT + 1),
    ):
        change(tmp_path, statement)
        said = f"it has format {found}, and this version of kvwire reads 2"
        with pytest.raises(UsageError, match=said), opened(tmp_path):
            pass


def test_a_table_of_a_later_minor_version_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    change(tmp_path, "CREATE TABLE later (one)")
    with opened(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / "index")) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    assert {"tier", "spaces", "blocks", "pins", "later"} <= tables


@pytest.mark.parametrize("length", [0, "'x'", 4097, 2**40])
def test_slabs_of_no_length_are_damage(tmp_path: Path, length: object) -> None:
    with opened(tmp_path):
        pass
    change(tmp_path, f"UPDATE tier SET slab_bytes = {length}")
    with pytest.raises(sqlite3.DatabaseError, match="slab size is missing"):
        DiskIndex(tmp_path / "index", SLAB, synced=False)


_values = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.binary(max_size=90), st.text(max_size=4)
)


@given(values=st.lists(_values, min_size=5, max_size=5))
@settings(
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_row_of_anything_makes_sense_or_is_none(
    tmp_path: Path, values: list[Any]
) -> None:
    """Of an index that somebody else has written to, or that is damaged."""
    with opened(tmp_path) as index:
        index.record(NAMESPACE, rows(1, 2), NONE)
    change(tmp_path, "REPLACE INTO blocks VALUES (1, ?, ?, ?, ?, ?)", *values)
    with opened(tmp_path) as index:
        for found in index.rows():
            assert set(found.slots.tolist()) <= {1, 2}
            assert all(16 < len(key) <= 80 for key in found.keys)
            assert (found.orders < len(ORDERS)).all()
            assert (found.nbytes > 0).all()


# --- namespaces in words
# ------------------------------------------------------------------


def test_so_many_spaces_and_no_more(tmp_path: Path) -> None:
    with opened(tmp_path) as index:
        index.namespaces.update(
            {bytes([0, *divmod(n, 256)]): NAMESPACE for n in range(4096)}
        )
        assert len(index.namespaces) == STORE_NAMESPACES_MAX
        index.record(NAMESPACE, rows(1), NONE)
        assert len(index.namespaces) == STORE_NAMESPACES_MAX
        assert slots_in(index) == [1]
    with opened(tmp_path) as index:
        assert index.namespaces == {}


_FIELDS = sorted(dict(SPEC.to_pairs()))
_texts = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.sampled_from(["9" * 5000, "-1", "0", "1e9", "٣", "float16", "\0"]),
)


@given(
    group=st.one_of(st.text(max_size=6), st.just("g" * (NAME_CHARS_MAX + 1))),
    fields=st.dictionaries(st.sampled_from([*_FIELDS, "new"]), _texts),
    whole=st.booleans(),
    raw=st.one_of(st.none(), st.binary(max_size=20), st.integers(0, 9), st.text()),
)
@settings(
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_description_is_a_space_or_none(
    tmp_path: Path, group: str, fields: dict[str, str], whole: bool, raw: object
) -> None:
    pairs = {**(dict(SPEC.to_pairs()) if whole else {}), **fields}
    told = msgspec.json.encode((group, list(pairs.items()))) if raw is None else raw
    with opened(tmp_path):
        pass
    change(tmp_path, "REPLACE INTO spaces VALUES (x'00', ?)", told)
    with opened(tmp_path) as index:
        for namespace in index.namespaces.values():
            assert 1 <= len(namespace.group) <= NAME_CHARS_MAX
            assert namespace.image_bytes > 0
