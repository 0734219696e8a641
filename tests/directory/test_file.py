"""A folder of records: half-written files, dead processes, what is no file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvwire import UsageError
from kvwire.directory.file import FileDirectory
from kvwire.limits import RECORD_BYTES_MAX
from tests.directory.records import record


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


async def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    directory = FileDirectory(f"file:{folder}")
    assert await directory.members() == ()
    await directory.announce(record(1))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert await directory.members() == (record(1),)
    await directory.close()
    assert not names(folder)


async def test_files_of_the_dead_are_not_read_and_then_removed(tmp_path: Path) -> None:
    directory = FileDirectory(f"file:{tmp_path}")
    await directory.write(record(1).key, record(1).encode(), 10.0)
    path = tmp_path / f"{record(1).key}.json"
    half = tmp_path / ".kvwire-half-written"
    half.write_bytes(b"{")
    for age_s, left in ((1, {path.name, half.name}), (61, {half.name})):
        os.utime(path, (time.time() - age_s,) * 2)
        assert await directory.members() == ()
        assert names(tmp_path) == left
    os.utime(half, (time.time() - 61,) * 2)
    assert await directory.members() == ()
    assert not names(tmp_path)


async def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """Somebody may name a folder that is for something else."""
    there = {"thesis.txt", "package.json", f"{record(1).key}.json", "tmpabcdefgh"}
    for name in there:
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1e9, 1e9))
    (tmp_path / "moved.json").write_bytes(record(2).encode())
    os.utime(tmp_path / "moved.json", (1e9, 1e9))
    directory = FileDirectory(f"file:{tmp_path}")
    assert await directory.members() == ()
    assert names(tmp_path) == {*there, "moved.json"}


async def test_one_file_that_cannot_be_read_hides_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = FileDirectory(f"file:{tmp_path}")
    await directory.write(record(1).key, record(1).encode(), 10.0)
    nameless = tmp_path / os.fsdecode(b"\xff.json")
    nameless.write_bytes(record(2).encode())
    os.utime(nameless, (time.time() + 10,) * 2)
    assert await directory.members() == (record(1),)
    nameless.unlink()

    def read(self: FileDirectory, key: str) -> bytes:
        if key == record(2).key:
            raise PermissionError(13, "Permission denied")
        return record(1).encode()

    await directory.write(record(2).key, record(2).encode(), 10.0)
    monkeypatch.setattr(FileDirectory, "_read", read)
    assert await directory.members() == (record(1),)
    assert directory.ignored == 1


async def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    directory = FileDirectory(f"file:{tmp_path}")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe.json")
    await directory.write("long", b"x" * (10 * RECORD_BYTES_MAX), 10.0)
    await directory.write(record(1).key, record(1).encode(), 10.0)
    assert await directory.members() == (record(1),)
    assert directory.ignored == 1


async def test_a_key_may_be_an_address(tmp_path: Path) -> None:
    directory = FileDirectory(f"file:{tmp_path}")
    made = record(1, incarnation="", address="unix:///run/../x y")
    await directory.announce(made)
    assert await directory.members() == (made,)
    await directory.close()
    assert not names(tmp_path)


@pytest.mark.parametrize("url", ["file://run/fleet", "file:/run/%00"])
def test_a_folder_that_is_none(url: str) -> None:
    with pytest.raises(UsageError, match='write "file:/path"'):
        FileDirectory(url)


def test_a_folder_of_this_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert FileDirectory("file:").folder == tmp_path / "kvwire"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert FileDirectory("file:").folder.name == f"kvwire-{os.getuid()}"
