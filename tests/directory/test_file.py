"""A folder of records: half-written files, dead processes, what is no file."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

import kvwire
from kvwire import UsageError
from kvwire.directory import ChangeKind
from kvwire.directory.file import FileDirectory
from kvwire.directory.limits import RECORD_BYTES_MAX
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


async def test_a_folder_stays_the_one_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory may change between two renewals."""
    monkeypatch.chdir(tmp_path)
    directory = FileDirectory("file:members")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    await directory.announce(record(1))
    assert names(tmp_path / "members")
    await directory.close()
    assert not names(tmp_path / "members")
    assert not names(tmp_path / "other")


async def test_files_of_the_dead_are_not_read_and_then_removed(
    tmp_path: Path,
) -> None:
    directory = FileDirectory(f"file:{tmp_path}")
    await directory.write(record(1).key, record(1).encode(), 10.0)
    path = tmp_path / f"{record(1).key}.json"
    half = tmp_path / ".kvwire-half-written"
    half.write_bytes(b"{")
    os.utime(path, (time.time() - 1,) * 2)
    for _ in range(2):
        assert await directory.members() == ()
        assert names(tmp_path) == {path.name, half.name}
    # A minute later, by the clock of the loop.
    directory.over_s = 0.0
    os.utime(half, (time.time() - 1,) * 2)
    assert await directory.members() == ()
    assert names(tmp_path) == {half.name}, "it has been written since"
    assert await directory.members() == ()
    assert not names(tmp_path)


@pytest.mark.parametrize("step_s", [30.0, 3600.0, -3600.0])
async def test_nobody_leaves_when_the_wall_clock_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """A virtual machine resumes, or NTP corrects the time."""
    now = time.time
    url = f"file:{tmp_path}?interval_s=0.02"
    announcing, watching = FileDirectory(url), FileDirectory(url)
    await announcing.announce(record(1, lease_s=0.6))
    async with aclosing(watching.watch()) as changes:
        assert (await anext(changes)).kind == ChangeKind.JOINED
        pending = asyncio.ensure_future(anext(changes))
        monkeypatch.setattr(time, "time", lambda: now() + step_s)
        monkeypatch.setattr(time, "time_ns", lambda: int((now() + step_s) * 1e9))
        await asyncio.wait({pending}, timeout=1.5)
        assert not pending.done()
        assert watching.reason == ""
        await announcing.close()
        assert (await pending).kind == ChangeKind.LEFT
    await watching.close()


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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert FileDirectory("file:").folder == tmp_path / "kvwire"
    beside = tmp_path / f"kvwire-{os.geteuid()}"
    # Of a login that is over, or of another user, as after `su`.
    for run in (str(tmp_path / "gone"), "/proc/1/kvwire", "", None):
        if run is None:
            monkeypatch.delenv("XDG_RUNTIME_DIR")
        else:
            monkeypatch.setenv("XDG_RUNTIME_DIR", run)
        assert FileDirectory("file:").folder == beside
    assert stat.S_IMODE(beside.stat().st_mode) == 0o700


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the folder of no name will be."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path / f"kvwire-{os.geteuid()}"


def _anybody_may_enter(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _is_another_users(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 54_399, -1)


def _is_a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def _is_a_file(folder: Path) -> None:
    folder.touch(mode=0o700)


SQUATTED = [
    (_anybody_may_enter, r"others may enter it \(mode 777\): chmod 700"),
    pytest.param(
        _is_another_users,
        "it belongs to user 54399, and this process is user",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives it away"),
    ),
    (_is_a_link, "it is a symbolic link"),
    (_is_a_file, "File exists"),
]


@pytest.mark.parametrize(("squat", "said"), SQUATTED)
async def test_a_folder_that_somebody_else_has_made_is_not_believed(
    default: Path, squat: Callable[[Path], None], said: str
) -> None:
    squat(default)
    with pytest.raises(UsageError, match=said):
        FileDirectory("file:")
    async with kvwire.open() as comm:
        await comm.listen("127.0.0.1:0")
        with pytest.raises(UsageError, match=said):
            comm.announce(role="decode")
        with pytest.raises(UsageError, match=said):
            comm.peer("role=decode")


@pytest.mark.parametrize(("squat", "said"), SQUATTED)
async def test_a_folder_that_is_squatted_later_is_not_believed(
    default: Path, squat: Callable[[Path], None], said: str
) -> None:
    directory = FileDirectory("file:")
    os.rmdir(default)  # noqa: PTH106 - nothing waits for it
    squat(default)
    with pytest.raises(kvwire.ConnectError, match=said):
        await directory.members()
    with pytest.raises(kvwire.ConnectError, match=said):
        await directory.write(record(1).key, record(1).encode(), 10.0)
    with suppress(NotADirectoryError):
        assert not names(default)


def test_a_folder_with_a_name_may_be_shared(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert FileDirectory(f"file:{tmp_path}").folder == tmp_path


async def test_no_folder_for_temporary_files(
    default: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose root is read-only: the error has a remedy."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    async with kvwire.open() as comm:
        await comm.listen("127.0.0.1:0")
        with pytest.raises(UsageError, match="set XDG_RUNTIME_DIR or TMPDIR"):
            comm.announce(role="decode")
        with pytest.raises(UsageError, match="set XDG_RUNTIME_DIR or TMPDIR"):
            comm.peer("role=decode")


async def test_a_folder_that_cannot_be_used_is_an_error_of_the_tree(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    directory = FileDirectory(f"file:{tmp_path / 'file' / 'fleet'}")
    with pytest.raises(kvwire.ConnectError, match="Not a directory"):
        await directory.members()
    with pytest.raises(kvwire.ConnectError, match="Not a directory"):
        await directory.write(record(1).key, record(1).encode(), 10.0)
    with pytest.raises(kvwire.ConnectError, match="Not a directory"):
        await directory.erase(record(1).key)
