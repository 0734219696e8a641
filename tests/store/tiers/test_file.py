"""Files of a tier: every byte to its place, however little a system call moves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.store.tiers.file import File, Views
from tests.support.depth import examples

SIZE = 10_000


class Reluctant(File):
    """Moves at most so many bytes in a call."""

    most = 7

    def preadv(self, views: Views, offset: int) -> int:
        return os.preadv(self._fd, [views[0][: self.most]], offset)

    def pwritev(self, views: Views, offset: int) -> int:
        return os.pwritev(self._fd, [views[0][: self.most]], offset)


@pytest.fixture(params=[File, Reluctant])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[File]:
    made: File = request.param(tmp_path / "file", create=True)
    with closing(made):
        made.resize(SIZE)
        yield made


def pieces(array: np.ndarray[tuple[int], np.dtype[np.uint8]], cuts: set[int]) -> Views:
    """An array in pieces, in the reverse of their order in memory."""
    borders, whole = [0, *sorted(cuts), array.size], memoryview(array.data)
    return [whole[begin:end] for begin, end in pairwise(borders)][::-1]


@given(
    nbytes=st.integers(1, 60),
    offset=st.integers(0, SIZE - 60),
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


def test_reading_past_the_end_is_an_error(file: File) -> None:
    target = np.zeros(100, np.uint8)
    with pytest.raises(OSError, match="shorter than it was"):
        file.read([target.data], SIZE - 99)
    with pytest.raises(OSError, match="shorter than it was"):
        file.read([target.data], 2 * SIZE)


def test_the_error_of_a_system_call_is_its_own(tmp_path: Path) -> None:
    """Of one whose descriptor is for reading only."""
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with closing(File(path)) as file:
        os.close(file._fd)
        file._fd = os.open(path, os.O_RDONLY)
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            file.write([memoryview(bytearray(8))], 0)
        assert caught.value.errno == errno.EBADF
        # It fails where it stands, and the next call is not about it.
        file.read([memoryview(bytearray(8))], 0)


def test_a_file_is_as_long_as_it_was_made(file: File) -> None:
    for nbytes in (SIZE, SIZE + 5000, 4096, 0, 1):
        file.resize(nbytes)
        assert file.nbytes == nbytes == file.path.stat().st_size


def test_room_on_the_disk_is_there_before_it_is_written(file: File) -> None:
    """So a full disk is an error of the open, and not of some write."""
    file.resize(1 << 20)
    assert file.path.stat().st_blocks * 512 >= 1 << 20


def test_only_its_owner_may_read_it(file: File) -> None:
    assert file.path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        File(tmp_path / "none")
    assert not list(tmp_path.iterdir())


def test_a_lock_is_one_files_and_ends_with_it(file: File) -> None:
    """Also while the process opens and closes the same file otherwise."""
    assert file.lock()
    assert len(file.path.read_bytes()) == SIZE
    with closing(File(file.path)) as other:
        assert not other.lock()
        file.close()
        assert other.lock()
        file._fd = os.dup(other._fd)
