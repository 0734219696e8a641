"""``kvwire store``: a server in a process of its own, and who looks at it."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest

from kvwire import UsageError
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.security.keys import write_key_file
from kvwire_store import BlockStore, command
from kvwire_store.server.messages import ClientRow, StatsReport, TierRow
from kvwire_store.tiers.base import TierStats
from packages.store.tests.server_child import serving
from tests.support.caches import Filled, chain
from tests.support.servers import free_port

Run = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command on a thread: exit status, output, errors."""

    async def running(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(main, ["store", *arguments])
        return status, *capsys.readouterr()

    return running


async def test_tenants_are_shown_and_deleted(tmp_path: Path, run: Run) -> None:
    tenant = f"acme?quota=1MiB&key={tmp_path}/acme"
    for name in ("acme", "all"):
        write_key_file(tmp_path / name)
    keys = ("--psk-file", str(tmp_path / "all"))
    tier = ("--tier", "memory:1MiB", "--tenant", tenant, *keys)
    async with serving(*tier) as server:
        where = f"{server.where}?psk_file={tmp_path}/acme"
        cache = Filled(seed=1).cache
        async with BlockStore.open([where]) as store:
            assert (await store.put(chain(3), cache, [0, 1, 2])).complete
        status, out, _ = await run("stats", server.where, *keys)
        assert status == 0
        assert "acme in memory:1MiB" in out
        status, out, _ = await run("stats", server.where, *keys, "--json")
        used = msgspec.json.decode(out)["tenants"][1]["tiers"]["memory:1MiB"]
        assert used["used_bytes"] == 3 * 4096
        status, _, said = await run("delete", server.where, *keys, "--tenant", "x")
        assert status
        assert "the tenants are acme" in said
        own = ("--psk-file", str(tmp_path / "acme"))
        status, _, said = await run("delete", server.where, *own, "--tenant", "other")
        assert status
        assert "it is tenant acme, and cannot act for 'other'" in said
        status, out, _ = await run("delete", server.where, *keys, "--tenant", "acme")
        assert (status, out) == (0, "deleted 3 blocks\n")
        async with BlockStore.open([where]) as store:
            assert await store.match(chain(3), cache) == 0


async def test_a_server_logs_what_its_operator_has_to_know(tmp_path: Path) -> None:
    """A tier that is away and comes back, and a client that has another key."""
    for name in ("own", "other"):
        write_key_file(tmp_path / name)
    key = ("--psk-file", str(tmp_path / "own"))
    port = free_port()
    away = f"kvwire://127.0.0.1:{port}"
    async with serving("--tier", "memory:1MiB", "--tier", away, *key) as server:
        (line,) = server.logged
        assert f"WARNING kvwire.store: tier {away}: cannot connect to" in line
        with pytest.raises(UsageError):
            await BlockStore.open([f"{server.where}?psk_file={tmp_path}/other"])
        line = await server.line()
        assert "WARNING kvwire.connections: " in line
        assert "refused: " in line
        async with serving("--tier", "memory:1MiB", port=port):
            line = await server.line()
            assert f"WARNING kvwire.store: tier {away} works again" in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_all_is_deleted_where_somebody_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an option or at a terminal; a pipe does not answer for anybody."""
    async with serving("--tier", "memory:1MiB") as server:
        cache = Filled(seed=1).cache
        async with BlockStore.open([server.where]) as store:
            assert (await store.put(chain(1), cache, [0])).complete
            for stdin in (io.StringIO("y\n"), Terminal("\n"), Terminal("no\n"), None):
                monkeypatch.setattr("sys.stdin", stdin)
                status, _, said = await run("delete", server.where)
                assert status == CALLED_WRONG
                assert "pass --all, or --tenant NAME" in said
            assert await store.match(chain(1), cache) == 1
            monkeypatch.setattr("sys.stdin", Terminal("y\n"))
            status, out, said = await run("delete", server.where)
            assert (status, out) == (0, "deleted 1 block\n")
            assert f"delete all blocks at {server.where}?" in said
            status, out, _ = await run("delete", server.where, "--all")
            assert (status, out) == (0, "deleted 0 blocks\n")


async def test_what_is_served_is_shown(tmp_path: Path, run: Run) -> None:
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
            # What a client does not count is not 0.
            assert store.stats()[server.where].blocks is None
        # It ends as it should, and what was put is on the disk.
        server.signal(signal.SIGTERM)
        assert await server.wait() == 0
    async with BlockStore.open(["memory:1MiB", disk]) as store:
        assert await store.match(chain(3)) == 3


async def test_read_only_and_with_a_key(tmp_path: Path, run: Run) -> None:
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


async def test_a_monitor_reads_numbers_and_health() -> None:
    async with serving("--tier", "memory:1MiB", "--metrics", "127.0.0.1:0") as server:
        url = server.said.partition("metrics at ")[2].partition(";")[0]
        for path, expected in (("/metrics", "kvwire_store_puts"), ("/health", "ok")):
            wanted = url.removesuffix("/metrics") + path
            with await asyncio.to_thread(urlopen, wanted, timeout=60) as answer:
                assert expected in answer.read().decode()


def test_long_names_have_a_line_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """None is broken, and the numbers stand below each other in 80 columns."""
    disk = f"disk:/srv/{'very/' * 20}long?size=100TiB"
    full = TierStats(
        blocks=999_999_999,
        used_bytes=999 << 30,
        size_bytes=999 << 40,
        read_blocks=999_999_999,
        written_blocks=999_999_999,
        evicted_blocks=999_999,
        failed_blocks=999,
    )
    client = ClientRow("decode-0", "[2001:db8::1]:50123", 64, 999_999_999, 1 << 40, 7)
    report = StatsReport(
        1,
        "store-0",
        read_only=True,
        tiers=(TierRow("memory:8GiB", "", TierStats()), TierRow(disk, "full", full)),
        clients=(client,),
        dropped=2,
    )
    command.show_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "store-0, read-only"
    assert lines[2] == "memory:8GiB"
    assert lines[4] == disk
    assert f"{disk}: full" in lines
    assert "clients: 1, 2 dropped" in lines
    assert "decode-0 at [2001:db8::1]:50123" in lines
    table = [lines[number] for number in (1, 3, 5)]
    assert len({len(line) for line in table}) == 1
    assert len(table[0]) <= 80
    assert table[1].split()[:3] == ["not", "counted", "-"]
    assert table[2].split()[:5] == ["999,999,999", "999", "GiB", "999", "TiB"]


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
