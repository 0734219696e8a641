"""The command: what it prints, and its exit status."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwire.cli.doctor import peer
from kvwire.cli.doctor.command import UNWELL
from kvwire.cli.doctor.peer import FRAGMENT_BYTES
from kvwire.cli.main import CALLED_WRONG, FAILED, INTERRUPTED, main
from kvwire.limits import MIB
from tests.cli.doctor.hosts import ward


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test sets is configured."""
    for name in os.environ:
        if name.startswith("KVWIRE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a doctor that listens, on a loop of its own, for little memory.

    Over tcp alone: other transports are tested where they live.
    """
    monkeypatch.setenv("KVWIRE_REQUIRE", "tcp")
    monkeypatch.setattr(peer, "PASS_BYTES", MIB)
    found: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = (
        queue.Queue()
    )

    async def serve() -> None:
        over = asyncio.Event()
        async with ward() as served:
            found.put((asyncio.get_running_loop(), over, str(served.address)))
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    loop, over, address = found.get()
    yield address
    loop.call_soon_threadsafe(over.set)
    thread.join()


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("kvwire ")
    assert any(line.split()[:2] == ["ok", "tcp"] for line in lines)


def test_json_of_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--pid", str(os.getppid()), "--json"]) == 0
    found = document(capsys)
    assert found["pid"] == os.getppid()
    assert {"system", "settings", "transports", "findings", "asked"} <= set(found)
    assert {"kvwire", "Python", "uvloop", "numpy"} <= set(found["versions"])
    assert "tcp" in {transport["name"] for transport in found["transports"]}


def test_what_is_required_and_missing_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvwire.toml"
    file.write_text('require = ["carrier-pigeon"]')
    assert main(["doctor", "--config", str(file)]) == UNWELL
    assert "carrier-pigeon" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--peer", "127.0.0.1:1", "--listen", "127.0.0.1:2"],
        ["--pid", "-1"],
        ["--peer", "no port"],
        ["--config", "no-such-file.toml"],
    ],
)
def test_called_wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == CALLED_WRONG
    assert capsys.readouterr().err


def test_nobody_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert main(["doctor", "--peer", address]) == UNWELL
    assert "stopped: ConnectError" in capsys.readouterr().out


def test_an_address_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["doctor", "--listen", address]) == FAILED
    assert f"{address}: Address already in use" in capsys.readouterr().err


def test_it_listens_until_it_is_ended() -> None:
    """And says where, with the real port."""
    command = [sys.executable, "-m", "kvwire", "doctor", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate()
        finally:
            process.kill()
    assert said.startswith("listening on tcp://127.0.0.1:")
    assert not said.startswith("listening on tcp://127.0.0.1:0;")
    assert output.startswith("kvwire ")
    assert process.returncode == INTERRUPTED


def test_a_peer_is_measured(listener: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--peer", listener]) == 0
    said = capsys.readouterr()
    assert "transport tcp" in said.err
    assert f"the side that listened, {listener}" in said.out
    assert "every byte compared: all equal" in said.out
    assert said.out.count("GB/s") == 2 * len(FRAGMENT_BYTES)
    assert said.out.splitlines()[-1] == "in order"


def test_a_peer_as_json(listener: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--peer", listener, "--json"]) == 0
    found = document(capsys)
    choice, trial = found["trials"]
    assert (choice["asked"], trial["asked"]) == ("", "tcp")
    assert trial["damaged"] == []
    assert {rate["verb"] for rate in trial["rates"]} == {"put", "get"}
    assert found["there"]["versions"]["kvwire"]
