"""``kvwire directory``: a table, JSON, and lines as things change."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

import kvwire
from kvwire.cli.inspect import screen
from kvwire.cli.main import main
from kvwire.directory.file import FileDirectory
from kvwire.endpoint.io_thread import called
from kvwire.endpoint.snapshot import CallSnapshot, PartSnapshot
from kvwire.observe.view import process_view
from tests.directory.records import record
from tests.support.caches import Memory


def write(folder: Path) -> None:
    async def writing() -> None:
        directory = FileDirectory(f"file:{folder}")
        for made in (
            record(1, role="prefill", model="demo"),
            record(2, role="decode", labels={"zone": "a", "rack": "7"}, load=0.5),
        ):
            await directory.write(made.key, made.encode(), 60.0)

    asyncio.run(writing())


def test_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["directory", "ls", "--directory", f"file:{tmp_path}"]) == 0
    head, decode, prefill = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["name", "role", "address"]
    words = ["n2", "decode", "tcp://127.0.0.1:7002", "0.50", "0" * 8, "rack=7,zone=a"]
    assert decode.split() == words
    assert "demo" in prefill


def test_json_of_the_configured_directory(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path)
    monkeypatch.setenv("KVWIRE_DIRECTORY", f"file:{tmp_path}")
    assert main(["directory", "ls", "role=decode", "--json"]) == 0
    (found,) = msgspec.json.decode(capsys.readouterr().out)
    assert found["name"] == "n2"
    assert found["labels"] == {"zone": "a", "rack": "7"}


def test_nobody_and_nonsense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def writing() -> None:
        await FileDirectory(f"file:{tmp_path}").write("x", b"{}", 60.0)

    asyncio.run(writing())
    where = ["--directory", f"file:{tmp_path}"]
    assert main(["directory", "ls", *where]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "no member is in file:" in err
    assert "1 entries are not valid records" in err
    assert main(["directory", "ls", "decode", *where]) == 2
    assert "not a valid term" in capsys.readouterr().err
    assert main(["directory", "ls", "--directory", "etcd:"]) == 2
    assert "unknown kind of directory 'etcd'" in capsys.readouterr().err


# --- what ``kvwire top`` and ``kvwire trace`` say of live processes -------------------


def test_a_look_at_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with (
        kvwire.Engine(name="prefill", inspect=str(folder)) as there,
        kvwire.Engine(name="decode", inspect=str(folder)) as here,
    ):
        connection = here.connect(there.listen("127.0.0.1:0"))
        out = there.publish("request-7", Memory().cache, [0])
        inc = here.pull(connection, "request-7", Memory().cache, [1])
        out.ready(layers=0)
        inc.wait_layer(0, timeout=10)
        assert main(["top", str(folder), "--once"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "request-7" in said
        assert "1/1/4" in said
        assert main(["top", str(folder), "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {line["name"] for line in lines} == {"prefill", "decode"}
        to = tmp_path / "trace.json"
        assert main(["trace", str(folder), "--to", str(to)]) == 0
        rows: list[dict[str, Any]] = json.loads(to.read_bytes())["traceEvents"]
        assert {"send request-7", "receive request-7"} <= {r["name"] for r in rows}
        out.abort()
        out.wait(10)
        inc.wait(10)
    assert main(["trace", str(folder)]) == 1
    assert "KVWIRE_INSPECT" in capsys.readouterr().err
    assert main(["top", str(folder), "--once"]) == 0
    assert "no process answers" in capsys.readouterr().out


def test_rates_and_trouble_are_on_the_screen() -> None:
    with kvwire.Engine(name="a\x1b[31m") as engine:
        now = engine.run(called(engine.communicator.snapshot))
    part = PartSnapshot(
        kind="store",
        name="memory:1MiB",
        calls=(CallSnapshot(text="get", age_s=1.5),),
        summary="3 pinned",
        trouble={"disk": "full"},
    )
    fields = {name: getattr(now, name) for name in now.__dataclass_fields__}
    counted = now.counters | {"received_bytes": 3 * 2**20}
    later = kvwire.Snapshot(
        **fields
        | {"at_s": now.at_s + 2, "counters": counted}
        | {"parts": (part,), "asked": ("nobody's",)}
    )
    console = Console(width=150, highlight=False, color_system=None)
    with console.capture() as shown:
        console.print(screen(process_view([later], [now], ["x.sock: timed out"])))
    said = shown.get()
    assert "\x1b" not in said
    for text in ("1.5 MiB", "get 1.5 s", "full", "asked for", "timed out"):
        assert text in said
