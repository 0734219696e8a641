"""A process that lets its user look in: who may, what is bounded, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import kvwire
from kvwire.endpoint.inspector import INSPECT_CLIENTS_MAX, INSPECT_LINE_BYTES_MAX
from kvwire.runtime.trace_ring import RINGS


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


async def ask(path: Path, line: bytes) -> bytes:
    """The answer; nothing if the process hangs up instead."""
    reader, writer = await asyncio.open_unix_connection(path, limit=2**20)
    answer = b""
    with suppress(ConnectionError):
        writer.write(line)
        answer = await reader.readline()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return answer


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.lstat().st_mode)


def found(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


async def test_a_line_is_answered_and_a_close_leaves_nothing(folder: Path) -> None:
    async with kvwire.open(name="a", inspect=str(folder)) as communicator:
        assert mode(folder) == 0o700
        (path,) = found(folder)
        assert path.name.startswith(
            f"{os.getpid()}-{communicator.incarnation.hex()[:8]}"
        )
        shown = msgspec.json.decode(
            await ask(path, b"snapshot\n"), type=kvwire.Snapshot
        )
        assert (shown.name, shown.pid) == ("a", os.getpid())
        assert b"events" in await ask(path, b"trace\n")
        assert b"error" in await ask(path, b"abort\n")
        # More than a line may have ends that client only.
        assert await ask(path, b"x" * (INSPECT_LINE_BYTES_MAX * 4)) == b""
        assert b"pid" in await ask(path, b"snapshot\n")
    assert not found(folder)
    assert asyncio.get_running_loop() not in RINGS


@pytest.mark.parametrize("turns", range(4))
async def test_an_opening_that_is_cancelled_leaves_nothing(
    folder: Path, turns: int
) -> None:
    async def opened() -> None:
        await (await kvwire.open(name="a", inspect=str(folder))).close()

    opening = asyncio.create_task(opened())
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert not found(folder)


async def test_those_who_look_are_bounded_and_do_not_hold_up_a_close(
    folder: Path,
) -> None:
    async with kvwire.open(inspect=str(folder)):
        (path,) = found(folder)
        held = [
            await asyncio.open_unix_connection(path) for _ in range(INSPECT_CLIENTS_MAX)
        ]
        for reader, writer in held:
            writer.write(b"snapshot\n")
            assert await reader.readline()
        assert await ask(path, b"snapshot\n") == b""
    for reader, writer in held:
        assert await reader.read() == b""
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    folder, link, file = (tmp_path / name for name in ("run", "link", "file"))
    folder.mkdir()
    folder.chmod(0o755)
    link.symlink_to(folder)
    file.touch()
    long = tmp_path / ("x" * (100 - len(str(tmp_path))))
    refused = {folder: "chmod 700", file / "run": "inspect=", long: "too long"}
    for place, said in {**refused, link: "a symbolic link"}.items():
        with pytest.raises(kvwire.UsageError, match=said):
            kvwire.Engine(inspect=str(place))


class Lines(logging.Handler):
    """Waits for a line of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.line: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.line.done():
            self.line.set_result(record.getMessage())


async def test_a_signal_dumps_a_snapshot_of_each() -> None:
    logger, lines = logging.getLogger("kvwire.inspect"), Lines()
    logger.addHandler(lines)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        async with (
            kvwire.open(name="a", inspect_signal=True) as first,
            kvwire.open(name="b", inspect_signal=True),
        ):
            await first.close()
            os.kill(os.getpid(), signal.SIGUSR1)
            said = await asyncio.wait_for(lines.line, 60)
    finally:
        logger.removeHandler(lines)
    assert '"name":"b"' in said
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_thread_without_signals_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with kvwire.Engine(inspect_signal=True):
        assert "only the main thread" in caplog.text
