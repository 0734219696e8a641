"""Looking into live processes: their sockets, their answers, and those who are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvwire
from kvwire.observe.inspect import snapshots, sockets, traces


def test_whoever_is_there_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with kvwire.Engine(name="a", inspect=str(folder)):
        paths = sockets(folder)
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(folder / "gone.sock"))
        (found,), silent = snapshots(sockets(folder))
        assert (found.name, silent) == ("a", [])
        (traced,), _ = traces(paths)
        assert (traced.name, traced.pid, traced.events) == ("a", found.pid, ())
        assert sockets(paths[0]) == paths
        monkeypatch.setenv("KVWIRE_INSPECT", str(folder))
        assert set(paths) < set(sockets(None))


def test_whoever_answers_nonsense_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.sock"
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(str(path))
        odd.listen()
        with socket.socket(socket.AF_UNIX) as early:
            # Its answer is waiting before it is asked.
            early.connect(str(path))
            served, _ = odd.accept()
            served.close()
        odd.shutdown(socket.SHUT_RDWR)
        assert snapshots([path, tmp_path / "none.sock"]) == (
            [],
            [f"none.sock: {_missing(tmp_path)}"],
        )


@pytest.mark.parametrize("said", [b'{"name":"\xff"}\n', b'{"a":' * 5000 + b"\n"])
def test_whoever_answers_what_cannot_be_read_is_named(
    said: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "odd.sock"
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(str(path))
        odd.listen()

        def answer() -> None:
            served, _ = odd.accept()
            with served:
                served.recv(100)
                served.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        found, silent = snapshots([path])
        thread.join()
    assert not found
    assert silent[0].startswith("odd.sock: ")


def _missing(folder: Path) -> str:
    with pytest.raises(FileNotFoundError) as caught:
        (folder / "none.sock").stat()
    return f"[Errno {caught.value.errno}] No such file or directory"


def test_no_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVWIRE_INSPECT", raising=False)
    with pytest.raises(kvwire.UsageError, match="KVWIRE_INSPECT"):
        sockets(None)
    with pytest.raises(kvwire.UsageError, match="No such file"):
        sockets(tmp_path / "none")


def test_processes_that_are_stopped_are_named(
    tmp_path: Path,
) -> None:
    code = (
        "import kvwire, sys; e = kvwire.Engine(inspect=sys.argv[1]); print(flush=True)"
    )
    command = [sys.executable, "-c", code + "; sys.stdin.read()", str(tmp_path / "run")]
    with contextlib.ExitStack() as stack:
        pids = []
        for _ in range(3):
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            pids.append(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
        found, silent = snapshots(sockets(tmp_path / "run"), 0.5)
        assert found == []
        assert len(silent) == len(pids)
        for pid in pids:
            assert any(f"pid {pid}, " in one for one in silent)
        assert all("is stopped; `kill -CONT" in one for one in silent)


def test_a_process_whose_loop_is_busy_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "busy.sock"
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen()
        (said,) = snapshots([path], 0.1)[1]
    assert f"pid {os.getpid()}, " in said
    assert "busy or blocked" in said
