"""``kvwire store``, run as a user runs it."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from kvwire import BlockStore
from kvwire.cli.main import main
from kvwire.trust import write_key_file
from tests.store.caches import Filled, chain
from tests.store.server_child import serving
from tests.support.tree import ROOT


async def run(*arguments: str) -> tuple[int, str, str]:
    """Run the command: exit status, output, errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvwire", "store", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_what_is_served_is_shown(tmp_path: Path) -> None:
    disk = f"disk:{tmp_path / 'kv'}?size=1MiB"
    tiers = ("--tier", "memory:1MiB", "--tier", disk)
    async with serving(*tiers) as server:
        async with BlockStore.open([server.where]) as store:
            put = await store.put(chain(3), Filled(seed=1).cache, [0, 1, 2])
            assert put.complete
            status, out, _ = await run("stats", server.where, "--json")
            assert status == 0
            report = msgspec.json.decode(out)
            assert [tier["blocks"] for tier in report["tiers"]] == [3, 3]
            assert [tier["name"] for tier in report["tiers"]] == ["memory:1MiB", disk]
            assert len(report["clients"]) == 2
            assert sum(one["written_bytes"] for one in report["clients"]) == 1536
            status, out, _ = await run("stats", f"127.0.0.1:{server.port}")
            assert status == 0
            assert "memory:1MiB" in out
            assert "clients: 2" in out
        # It ends as it should, and what was put is on the disk.
        server.signal(signal.SIGTERM)
        assert await server.wait() == 0
    async with BlockStore.open(["memory:1MiB", disk]) as store:
        assert await store.match(chain(3)) == 3


async def test_read_only_and_with_a_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    write_key_file(key)
    arguments = ("--tier", "memory:1MiB", "--psk-file", str(key), "--read-only")
    async with serving(*arguments) as server:
        where = f"127.0.0.1:{server.port}"
        status, out, _ = await run("stats", where, "--psk-file", str(key))
        assert status == 0
        assert "read-only" in out
        status, _, err = await run("stats", where)
        assert status == 1
        assert "trust" in err
        async with BlockStore.open([f"{server.where}?psk_file={key}"]) as store:
            put = await store.put(chain(1), Filled(seed=1).cache, [0])
            assert "read-only" in put.missing["kv", 0]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["stats", "127.0.0.1:1"], 1, "127.0.0.1"),
        (["stats", "127.0.0.1"], 2, "port"),
        (["serve", "--listen", "127.0.0.1:0", "--tier", "tape:x"], 2, "memory"),
        (["serve", "--listen", "0.0.0.0:0", "--tier", "memory:1MiB"], 2, "keygen"),
        (["serve", "--listen", "127.0.0.1:0"], 2, "tier"),
        (
            ["serve", "--listen", "x:1", "--tier", "memory:1MiB", "--berth", "big"],
            2,
            "--berth",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", *arguments]) == status
    captured = capfd.readouterr()
    assert said in captured.err + captured.out
    assert "Traceback" not in captured.err
