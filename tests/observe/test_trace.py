"""A file for Perfetto: slices, instants, and an arrow from the one end to the other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvwire
import kvwire_store
from kvwire.driver.trace_ring import RINGS
from kvwire.observe.inspect import ProcessTrace, snapshots, sockets, traces
from kvwire.observe.trace import document
from tests.support.caches import Memory
from tests.support.world import World, play, scenario

LIST, DEST = [1, 2, 3], [11, 12, 13]


def named(rows: list[dict[str, Any]], phase: str) -> list[str]:
    return [row["name"] for row in rows if row["ph"] == phase]


@pytest.mark.parametrize("push", [False, True])
def test_both_ends_are_one_trace(push: bool, tmp_path_factory: Any) -> None:
    folder = str(tmp_path_factory.mktemp("i") / "run")

    async def run(w: World) -> None:
        out, inc = w.begin(push=push)
        out.ready()
        out.finish()
        await inc
        await out
        assert inc.traceparent.split("-")[1] == out.traceparent.split("-")[1]
        assert len(inc.traceparent) == 55
        await w.until(lambda: not w.p.transfers())
        (ring,) = RINGS.values()
        rows = document([ProcessTrace("both", 1, tuple(ring.events))])["traceEvents"]
        assert sorted(named(rows, "X")) == ["receive t", "send t"]
        assert {"marked", "sent layer 0", "landed layer 0"} <= {*named(rows, "i")}
        assert named(rows, "s") == named(rows, "f") == ["transfer"]
        start, end = (r for r in rows if r["ph"] in "sf")
        slices = {r["name"]: r for r in rows if r["ph"] == "X"}
        assert start["tid"] == slices["send t"]["tid"] != end["tid"]
        assert slices["receive t"]["args"]["outcome"] == "complete"
        assert msgspec.json.encode(rows)

    play(run, "inproc", inspect=folder)


@scenario("inproc")
async def test_nobody_who_does_not_trace_is_in_a_trace(w: World) -> None:
    out = w.p.publish("t", w.source.cache, LIST)
    assert out.traceparent == ""
    out.abort()
    assert not RINGS


def test_what_a_transfer_that_was_cut_leaves() -> None:
    events = (
        (1_000, "landed", "early", (0, 1, 10)),
        (2_000, "begin", "a", ("x", "receive")),
        (3_000, "begin", "b", ("y", "receive")),
        (4_000, "lost", "a", ()),
        (5_000, "end", "a", ("failed", 0, "00")),
        (6_000, "begin", "c", ("z", "receive")),
        (9_000, "met", "c", ("peer",)),
    )
    rows = document([ProcessTrace("p", 1, events)])["traceEvents"]
    slices = {row["name"]: row for row in rows if row["ph"] == "X"}
    where = {name: (row["tid"], row["dur"]) for name, row in slices.items()}
    # The first track is free again when z begins; what is open reaches to the end.
    assert where == {"receive x": (1, 3), "receive y": (2, 6), "receive z": (1, 3)}
    assert slices["receive z"]["args"]["peer"] == "peer"
    assert named(rows, "i") == ["lost", "end", "met"]
    assert not named(rows, "s")


async def test_store_calls_are_in_it(tmp_path: Any) -> None:
    cache = Memory().cache
    async with (
        kvwire_store.BlockStore.open(["memory:1MiB"]) as store,
        kvwire.open(inspect=str(tmp_path / "run")),
    ):
        await store.put([b"one"], cache, [0])
        (ring,) = RINGS.values()
        assert [(what, more[:2]) for _, what, _, more in ring.events] == [
            ("begin", ("1 blocks", "put")),
            ("end", ("over", 0)),
        ]


# --- looking into live processes: their sockets, their answers, and those who are gone


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
