"""The directory of a disk tier: one user at a time, a new one and an old one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire import UsageError
from kvwire.limits import KIB
from kvwire_store.keys import as_keys
from kvwire_store.namespace import Namespace
from kvwire_store.tiers.directory import File, TierDirectory, Views
from kvwire_store.tiers.disk_index import DiskRows
from tests.support.caches import STORED as SPEC
from tests.support.depth import examples

SLAB = 64 * KIB
SIZE = 4 * SLAB
NAMESPACE = Namespace("kv", SPEC)
NONE = np.empty(0, np.int64)


@contextmanager
def opened(
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


def slots_in(directory: TierDirectory) -> list[int]:
    return [slot for some in directory.index.rows() for slot in some.slots.tolist()]


def test_a_directory_is_made_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where"
    with opened(path) as first:
        assert (first.slabs, first.index.slab_bytes, first.file.nbytes) == (
            4,
            SLAB,
            SIZE,
        )
    # Slabs stay as they were made, whatever is asked for now.
    with opened(path, 2 * SIZE, 2 * SLAB) as second:
        assert (second.slabs, second.index.slab_bytes) == (8, SLAB)


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.index.record(NAMESPACE, rows(1), NONE)
        files = list(tmp_path.iterdir())
        assert len(files) == 3
        assert not any(file.stat().st_mode & 0o077 for file in files)


def test_a_directory_is_one_users(tmp_path: Path) -> None:
    with (
        opened(tmp_path),
        pytest.raises(UsageError, match="this process has this store open"),
    ):
        TierDirectory(tmp_path, SIZE, SLAB, False, File)
    with opened(tmp_path) as directory:
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
        with opened(tmp_path, SLAB):
            pass
    with (
        pytest.raises(OSError, match="No space left"),
        opened(tmp_path, file_type=FullDisk),
    ):
        pass
    assert (tmp_path / "images").stat().st_size == (SLAB if made else 0)
    with opened(tmp_path) as directory:
        assert directory.slabs == 4


def test_what_is_cut_off_is_not_there_when_it_grows_again(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.index.dirty()
        directory.index.record(NAMESPACE, rows(0, 15, 16, 63), NONE)
    with opened(tmp_path, SLAB) as directory:
        assert directory.file.nbytes == SLAB
        assert slots_in(directory) == [0, 15]
    with opened(tmp_path) as directory:
        assert slots_in(directory) == [0, 15]


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
