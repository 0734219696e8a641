"""The directory of a disk tier and its index: one user, rows that are all there."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire import UsageError
from kvwire.limits import KIB, NAME_CHARS_MAX
from kvwire_store.keys import as_keys
from kvwire_store.limits import STORE_NAMESPACES_MAX
from kvwire_store.namespace import ORDERS, Namespace
from kvwire_store.tiers.directory import File, TierDirectory, Views
from kvwire_store.tiers.disk_index import FORMAT, DiskIndex, DiskRows
from tests.support.caches import STORED as SPEC
from tests.support.depth import examples

SLAB = 64 * KIB
SIZE = 4 * SLAB
NAMESPACE = Namespace("kv", SPEC)
NONE = np.empty(0, np.int64)


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
        said = f"it has format {found}, and this version of kvwire reads {FORMAT}"
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


# --- the directory ------------------------------------------------------------------


@contextmanager
def opening(
    path: Path,
    nbytes: int = SIZE,
    slab_bytes: int = SLAB,
    file_type: type[File] = File,
) -> Iterator[TierDirectory]:
    directory = TierDirectory(path, nbytes, slab_bytes, False, file_type)
    try:
        yield directory
    finally:
        directory.close(in_order=True)


def rows(*slots: int) -> DiskRows:
    """Rows of some slots, each of a block of its own."""
    count = len(slots)
    return DiskRows(
        np.array(slots),
        as_keys(NAMESPACE.digest + bytes([slot % 256]) for slot in slots),
        np.zeros(count, np.uint8),
        np.full(count, NAMESPACE.image_bytes),
        np.arange(count, dtype=np.uint64),
        np.arange(count),
    )


def test_a_directory_is_made_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where"
    with opening(path) as first:
        assert (first.slabs, first.index.slab_bytes, first.file.nbytes) == (
            4,
            SLAB,
            SIZE,
        )
    # Slabs stay as they were made, whatever is asked for now.
    with opening(path, 2 * SIZE, 2 * SLAB) as second:
        assert (second.slabs, second.index.slab_bytes) == (8, SLAB)


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    with opening(tmp_path) as directory:
        directory.index.record(NAMESPACE, rows(1), NONE)
        files = list(tmp_path.iterdir())
        assert len(files) == 3
        assert not any(file.stat().st_mode & 0o077 for file in files)


def test_a_directory_is_one_users(tmp_path: Path) -> None:
    with (
        opening(tmp_path),
        pytest.raises(UsageError, match="this process has this store open"),
    ):
        TierDirectory(tmp_path, SIZE, SLAB, False, File)
    with opening(tmp_path) as directory:
        assert directory.slabs == 4


class FullDisk(File):
    """Allocates half of what it is asked for, as ext4 does, and fails."""

    def allocate(self, offset: int, nbytes: int) -> None:
        os.ftruncate(self._fd, offset + nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("made", [False, True])
def test_an_open_that_fails_leaves_nothing_open(tmp_path: Path, made: bool) -> None:
    """Nor room taken, which the index of a smaller tier needs; the next succeeds."""
    if made:
        with opening(tmp_path, SLAB):
            pass
    with (
        pytest.raises(OSError, match="No space left"),
        opening(tmp_path, file_type=FullDisk),
    ):
        pass
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert (SLAB in sizes) if made else not sizes
    with opening(tmp_path) as directory:
        assert directory.slabs == 4


def test_what_is_cut_off_is_not_there_when_it_grows_again(tmp_path: Path) -> None:
    with opening(tmp_path) as directory:
        directory.index.dirty()
        directory.index.record(NAMESPACE, rows(0, 15, 16, 63), NONE)
    with opening(tmp_path, SLAB) as directory:
        assert directory.file.nbytes == SLAB
        assert slots_in(directory.index) == [0, 15]
    with opening(tmp_path) as directory:
        assert slots_in(directory.index) == [0, 15]


FILE_BYTES = 10_000


class Reluctant(File):
    """Moves at most so many bytes in a call."""

    most = 7

    def preadv(self, views: Views, offset: int) -> int:
        return os.preadv(self._fd, [views[0][: self.most]], offset)

    def pwritev(self, views: Views, offset: int) -> int:
        return os.pwritev(self._fd, [views[0][: self.most]], offset)


@pytest.fixture(params=[File, Reluctant])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[File]:
    made: File = request.param(tmp_path / "file")
    with closing(made):
        made.resize(FILE_BYTES)
        yield made


def pieces(array: np.ndarray[tuple[int], np.dtype[np.uint8]], cuts: set[int]) -> Views:
    """An array in pieces, in the reverse of their order in memory."""
    borders, whole = [0, *sorted(cuts), array.size], memoryview(array.data)
    return [whole[begin:end] for begin, end in pairwise(borders)][::-1]


@given(
    nbytes=st.integers(1, 60),
    offset=st.integers(0, FILE_BYTES - 60),
    cuts=st.sets(st.integers(1, 59), max_size=6),
    others=st.sets(st.integers(1, 59), max_size=6),
)
@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_what_is_written_is_read(
    file: File, nbytes: int, offset: int, cuts: set[int], others: set[int]
) -> None:
    """In whatever pieces on both sides, and nothing beside it is touched."""
    source = np.random.default_rng(offset).integers(1, 256, nbytes, np.uint8)
    target, before = np.zeros(nbytes, np.uint8), file.path.read_bytes()
    from_, into = ({c for c in one if c < nbytes} for one in (cuts, others))
    file.write(pieces(source, from_), offset)
    stream = b"".join(pieces(source, from_))
    after = file.path.read_bytes()
    assert after == before[:offset] + stream + before[offset + nbytes :]
    file.read(pieces(target, into), offset)
    assert b"".join(pieces(target, into)) == stream


def test_more_pieces_than_a_call_takes(file: File) -> None:
    """Linux takes 1024 in one call."""
    source = np.random.default_rng(1).integers(0, 256, 5000, np.uint8)
    cuts = set(range(1, 5000))
    target = np.zeros_like(source)
    file.write(pieces(source, cuts), 0)
    assert file.path.read_bytes()[:5000] == source[::-1].tobytes()
    file.read(pieces(target, cuts), 0)
    assert np.array_equal(source, target)


def test_room_on_the_disk_is_there_before_it_is_written(file: File) -> None:
    """So a full disk is an error of the open, and not of some write."""
    file.resize(1 << 20)
    assert file.path.stat().st_blocks * 512 >= 1 << 20
