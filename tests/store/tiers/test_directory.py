"""The directory of a disk tier: one user at a time, a new one and an old one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvwire import UsageError
from kvwire.limits import KIB
from kvwire.store.index import as_keys
from kvwire.store.namespace import Namespace
from kvwire.store.tiers.directory import TierDirectory
from kvwire.store.tiers.disk_index import DiskRows
from kvwire.store.tiers.file import File
from tests.store.caches import SPEC
from tests.store.files import Faults, scripted

SLAB = 64 * KIB
SIZE = 4 * SLAB
NAMESPACE = Namespace("kv", SPEC)


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
        directory.index.record(NAMESPACE, rows(1))
        files = list(tmp_path.iterdir())
        assert len(files) == 3
        assert not any(file.stat().st_mode & 0o077 for file in files)


def test_a_directory_is_one_users(tmp_path: Path) -> None:
    with (
        opened(tmp_path),
        pytest.raises(UsageError, match="another process has this store open"),
    ):
        TierDirectory(tmp_path, SIZE, SLAB, False, File)
    with opened(tmp_path) as directory:
        assert directory.slabs == 4


def test_a_tier_of_the_first_format_is_refused(tmp_path: Path) -> None:
    """And left as it is: an earlier kvwire reads it still."""
    (tmp_path / "blocks").write_bytes(b"kvwstore")
    with (
        pytest.raises(UsageError, match=r"by an earlier kvwire.*delete the directory"),
        opened(tmp_path),
    ):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["blocks"]


def test_a_file_that_cannot_be_closed_lets_go_of_the_index(tmp_path: Path) -> None:
    class Stuck(File):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        pytest.raises(OSError, match="Input/output"),
        opened(tmp_path, file_type=Stuck),
    ):
        pass
    with opened(tmp_path) as directory:
        assert directory.whole


@pytest.mark.parametrize("made", [False, True])
def test_an_open_that_fails_leaves_nothing_open(tmp_path: Path, made: bool) -> None:
    """And the next one succeeds."""
    if made:
        with opened(tmp_path, SLAB):
            pass
    faults = Faults()
    faults.failing["allocate"] = errno.EIO
    with (
        pytest.raises(OSError, match="Input/output"),
        opened(tmp_path, file_type=scripted(faults)),
    ):
        pass
    with opened(tmp_path) as directory:
        assert directory.slabs == 4


def test_a_size_of_less_than_a_slab_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with (
        pytest.raises(UsageError, match=r"slabs have 65536 bytes.*larger size"),
        opened(tmp_path, SLAB - 1),
    ):
        pass


def test_a_place_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError), opened(tmp_path / "file"):
        pass


def test_what_is_cut_off_is_not_there_when_it_grows_again(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.index.dirty()
        directory.index.record(NAMESPACE, rows(0, 15, 16, 63))
    with opened(tmp_path, SLAB) as directory:
        assert directory.file.nbytes == SLAB
        assert slots_in(directory) == [0, 15]
    with opened(tmp_path) as directory:
        assert slots_in(directory) == [0, 15]


def test_images_that_somebody_has_cut_are_not_taken_at_their_word(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as directory:
        assert not directory.whole
    with opened(tmp_path) as directory:
        assert directory.whole
    os.truncate(tmp_path / "images", SLAB)
    with opened(tmp_path) as directory:
        assert not directory.whole
        assert directory.file.nbytes == SIZE
    (tmp_path / "images").unlink()
    with opened(tmp_path) as directory:
        assert not directory.whole
