"""``kvwire directory``: a table, JSON, and lines as things change."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvwire.cli.main import main
from kvwire.directory.file import FileDirectory
from tests.directory.records import record


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
    assert "no member matches anything" in err
    assert "1 entries are not valid records" in err
    assert main(["directory", "ls", "decode", *where]) == 2
    assert "not a valid term" in capsys.readouterr().err
    assert main(["directory", "ls", "--directory", "etcd:"]) == 2
    assert "unknown kind of directory 'etcd'" in capsys.readouterr().err


@pytest.mark.parametrize("json", [False, True])
def test_a_line_for_each_change(tmp_path: Path, json: bool) -> None:
    command = [sys.executable, "-m", "kvwire", "directory", "watch"]
    command += ["--directory", f"file:{tmp_path}?interval_s=0.05"]
    with subprocess.Popen(
        command + json * ["--json"], stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        write(tmp_path)
        lines = sorted(watching.stdout.readline() for _ in range(2))
        for path in tmp_path.iterdir():
            path.unlink()
        lines += sorted(watching.stdout.readline() for _ in range(2))
        watching.terminate()
    if json:
        changes = [msgspec.json.decode(line) for line in lines]
        kinds = [change["change"] for change in changes]
        assert {change["record"]["name"] for change in changes} == {"n1", "n2"}
    else:
        kinds = [line.split()[0] for line in lines]
        assert "n1 prefill tcp://127.0.0.1:7001 0.00 00000000 demo\n" in lines[0]
    assert kinds == ["joined", "joined", "left", "left"]
