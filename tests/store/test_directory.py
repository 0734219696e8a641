"""The directory of a disk tier: its lock, its file, and its spaces in words."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire import UsageError
from kvwire.limits import KIB, MIB, NAME_CHARS_MAX, STORE_SPACES_MAX
from kvwire.store.directory import Directory
from kvwire.store.file import File
from kvwire.store.slab_file import SUPERBLOCK_BYTES
from kvwire.store.space import Space
from tests.store.caches import SPEC
from tests.store.files import Faults, scripted

SLAB = 64 * KIB
SIZE = SUPERBLOCK_BYTES + 4 * SLAB
SPACE = Space("kv", SPEC)
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def opened(
    path: Path,
    nbytes: int = SIZE,
    slab_bytes: int = SLAB,
    file_type: type[File] = File,
) -> Directory:
    return Directory.open(path, nbytes, slab_bytes, file_type)


# --- one at a time --------------------------------------------------------------------


def test_a_directory_is_made_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where"
    with closing(opened(path)) as first:
        assert (first.slabs, first.slab_bytes) == (4, SLAB)
        assert first.spaces == {}
    # Slabs stay as they were made, whatever is asked for now.
    with closing(opened(path, 2 * SIZE, 2 * SLAB)) as second:
        assert (second.slabs, second.slab_bytes) == (8, SLAB)


def test_a_directory_is_one_users(tmp_path: Path) -> None:
    with (
        closing(opened(tmp_path)),
        pytest.raises(UsageError, match=f"process {os.getpid()} has this store open"),
    ):
        opened(tmp_path)
    opened(tmp_path).close()


def test_whoever_locked_it_without_a_name_is_named_as_unknown(tmp_path: Path) -> None:
    with closing(opened(tmp_path)):
        (tmp_path / "lock").write_bytes(b"\xff" * 40)
        with pytest.raises(UsageError, match="process \ufffd"):
            opened(tmp_path)
        (tmp_path / "lock").write_bytes(b"")
        with pytest.raises(UsageError, match=r"process \? has"):
            opened(tmp_path)


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
def test_a_lock_that_cannot_be_written_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A full disk has no room for a process's number either."""
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _failing(NO_SPACE))
        with pytest.raises(UsageError, match="the disk has no room"):
            opened(tmp_path)
    opened(tmp_path).close()


def test_a_file_that_cannot_be_closed_lets_go_of_the_lock(tmp_path: Path) -> None:
    class Stuck(File):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output"):
        opened(tmp_path, file_type=Stuck).close()
    opened(tmp_path).close()


@pytest.mark.parametrize("call", ["allocate", "pwritev", "sync", "preadv"])
@pytest.mark.parametrize("made", [False, True])
def test_an_open_that_fails_leaves_nothing_open(
    tmp_path: Path, call: str, made: bool
) -> None:
    """And the next one succeeds, wherever the first has stopped."""
    if made:
        opened(tmp_path, SUPERBLOCK_BYTES + SLAB).close()
    faults = Faults()
    faults.failing[call] = errno.EIO
    # Of a new file nothing is read, and of an old one its first page only.
    fails = call == "allocate" or made == (call == "preadv")
    if fails:
        with pytest.raises(OSError, match="Input/output"):
            opened(tmp_path, file_type=scripted(faults))
    else:
        opened(tmp_path, file_type=scripted(faults)).close()
    with closing(opened(tmp_path)) as directory:
        assert directory.slabs == 4


def test_a_place_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError):
        opened(tmp_path / "file")
    (tmp_path / "taken" / "blocks").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        opened(tmp_path / "taken")
    (tmp_path / "taken" / "blocks").rmdir()
    opened(tmp_path / "taken").close()


# --- spaces in words ------------------------------------------------------------------


def test_spaces_are_found_again(tmp_path: Path) -> None:
    others = [Space("kv", replace(SPEC, layers=n)) for n in (1, 3)]
    with closing(opened(tmp_path)) as directory:
        for space in (SPACE, *others, SPACE):
            directory.describe(space)
    with closing(opened(tmp_path)) as directory:
        assert set(directory.spaces) == {s.digest for s in (SPACE, *others)}
        for space in (SPACE, *others):
            found = directory.spaces[space.digest]
            assert found.group == space.group
            assert found.spec.to_pairs() == space.spec.to_pairs()


def test_so_many_spaces_and_no_more(tmp_path: Path) -> None:
    more = STORE_SPACES_MAX + 2
    told = [{"group": f"g{n}", "spec": SPEC.to_pairs()} for n in range(more)]
    (tmp_path / "spaces.json").write_bytes(msgspec.json.encode(told))
    with closing(opened(tmp_path)) as directory:
        assert len(directory.spaces) == STORE_SPACES_MAX
        before = (tmp_path / "spaces.json").stat()
        directory.describe(SPACE)
        assert len(directory.spaces) == STORE_SPACES_MAX
        assert (tmp_path / "spaces.json").stat() == before


def test_a_huge_description_is_not_even_read(tmp_path: Path) -> None:
    with (tmp_path / "spaces.json").open("wb") as file:
        file.truncate(16 * MIB + 1)
    with closing(opened(tmp_path)) as directory:
        assert directory.spaces == {}


# A new description is under another name until it is whole, so one that was cut off
# replaces nothing.
def test_half_a_description_is_none(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as directory:
        directory.describe(SPACE)
    whole = (tmp_path / "spaces.json").read_bytes()
    (tmp_path / "spaces.json.new").write_bytes(whole[:-9])
    with closing(opened(tmp_path)) as directory:
        assert set(directory.spaces) == {SPACE.digest}
        directory.describe(Space("other", SPEC))
    with closing(opened(tmp_path)) as directory:
        assert len(directory.spaces) == 2


_FIELDS = sorted(dict(SPEC.to_pairs()))
_values = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.sampled_from(["9" * 5000, "-1", "0", "1e9", "٣", "float16", "\ud800", "\0"]),
)


@given(
    group=st.one_of(st.text(max_size=6), st.just("g" * (NAME_CHARS_MAX + 1))),
    fields=st.dictionaries(st.sampled_from([*_FIELDS, "new"]), _values),
    whole=st.booleans(),
)
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_description_is_a_space_or_none(
    tmp_path: Path, group: str, fields: dict[str, str], whole: bool
) -> None:
    """Of a file that somebody else has written to."""
    pairs = {**(dict(SPEC.to_pairs()) if whole else {}), **fields}
    told = [{"group": group, "spec": list(pairs.items())}]
    try:
        text = msgspec.json.encode(told)
    except UnicodeEncodeError:
        text = b'[{"group": "\xed\xa0\x80", "spec": []}]'
    (tmp_path / "spaces.json").write_bytes(text)
    with closing(opened(tmp_path)) as directory:
        for space in directory.spaces.values():
            assert 1 <= len(space.group) <= NAME_CHARS_MAX
            assert space.image_bytes > 0


def _failing(error: OSError) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise error

    return call
