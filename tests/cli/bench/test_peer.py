"""Benchmarks with a peer: two processes over loopback, and what a peer may not do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvwire
from kvwire import Address
from kvwire.cli.bench import ops, peer
from kvwire.cli.bench.limits import (
    BENCH_CALL_BYTES_MAX,
    BENCH_FRAGMENTS_MAX,
    BENCH_IN_FLIGHT_MAX,
)
from kvwire.cli.bench.operations import (
    PROFILE,
    ConnectionChannel,
    OpsRound,
    OpsWork,
    operations,
)
from kvwire.cli.bench.peer import ServedBench, attend
from kvwire.cli.bench.side import Bench, BenchError, Drive, driven
from kvwire.cli.keygen import keygen
from kvwire.cli.main import CALLED_WRONG, INTERRUPTED, main
from kvwire.limits import KIB, KV_LAYERS_MAX, MIB

PUSH = OpsWork(verb="push", nbytes=MIB, count=1, layers=4, blocks=16)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two keys, of which this process has the one called good."""
    for name in ("good", "other"):
        keygen(tmp_path / name)
    monkeypatch.setenv("KVWIRE_TRUST", "psk")
    monkeypatch.setenv("KVWIRE_PSK_FILE", str(tmp_path / "good"))
    return tmp_path


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``kvwire bench serve`` in a process of its own, and where it listens."""
    command = [sys.executable, "-m", "kvwire", "bench", "serve"]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),  # which a fixture may have replaced
    ) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            assert line.startswith("listening on tcp://127.0.0.1:"), line
            yield line.split()[2].rstrip(";"), process
        finally:
            process.kill()


# --- from the command line ------------------------------------------------------------


@pytest.mark.usefixtures("sides")
def test_two_processes_with_a_key_measure_every_benchmark(
    keys: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ops, "SIZES", (64 * KIB,))
    out = tmp_path / "found.json"
    few = ["--transport", "tcp", "--round-mib", "1", "--rounds", "1"]
    with serving() as (address, process):
        for name, cases in (("fragments --sizes-kib 4", 6), ("messages", 4)):
            arguments = [*name.split(), *few, "--peer", address, "--json", str(out)]
            assert main(["bench", *arguments]) == 0
            found: dict[str, Any] = json.loads(out.read_text())
            assert found["settings"]["peer"] == address
            assert len(found["cases"]) == cases
            for row in found["cases"]:
                assert not row["failures"]
                (samples,) = row["contenders"].values()
                assert samples["low"] > 0
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == INTERRUPTED
    assert len(re.findall("served 'bench-left' .* over tcp", said)) == 2
    printed = capsys.readouterr().out
    assert f"kvwire bench fragments to {address}" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.usefixtures("threads")
def test_another_key_is_no_way_in(
    keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (address, process):
        monkeypatch.setenv("KVWIRE_PSK_FILE", str(keys / "other"))
        arguments = ["--transport", "tcp", "--sizes-kib", "4", "--rounds", "1"]
        assert main(["bench", "fragments", *arguments, "--peer", address]) == 1
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert "AuthenticationFailed" in capsys.readouterr().out
    assert "served" not in said


@pytest.mark.usefixtures("threads")
def test_more_than_the_peer_has_is_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving("--memory-mib", "1") as (address, _):
        arguments = ["--transport", "tcp", "--sizes-kib", "4", "--rounds", "1"]
        assert main(["bench", "fragments", *arguments, "--peer", address]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "128 MiB of memory requested; this side gives a peer at most 1 MiB" in printed
    )


def test_an_address_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "messages", "--peer", "no port"]) == CALLED_WRONG
    assert "no port" in capsys.readouterr().err


# --- one that serves in this process --------------------------------------------------


@asynccontextmanager
async def served(
    profile: dict[str, str] = PROFILE,
) -> AsyncIterator[tuple[Address, list[ServedBench]]]:
    """Where one listens that serves with 4 MiB, and the benches that are over."""
    ended: list[ServedBench] = []
    async with kvwire.open(profile=profile, require=("tcp",)) as there:
        address = await there.listen("127.0.0.1:0")
        made = partial(ServedBench, memory_bytes_max=4 * MIB)
        attending = asyncio.create_task(attend(there, made, ended.append))
        yield address, ended
        await there.close()
        await attending


@asynccontextmanager
async def measuring(address: Address) -> AsyncIterator[Drive]:
    """Ask a left side of this process for rounds with a peer."""
    b = Bench({"transport": "tcp", "peer": str(address)})
    async with driven(b, operations) as (_, ask):
        yield ask


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[ConnectionChannel]:
    """Connect, and send what a test wants in the place of a left side."""
    async with kvwire.open() as here:
        channel = ConnectionChannel(await here.connect(address))
        assert await channel.receive() == {}
        yield channel


async def test_a_peer_of_another_version_is_named() -> None:
    async with served({"kvwire.bench": "0"}) as (address, _):
        with pytest.raises(
            BenchError, match="not run `kvwire bench serve` of this version"
        ):
            async with measuring(address):
                pass


@pytest.mark.parametrize("verb", ["push", "pull", "put", "get"])
async def test_a_peer_that_vanishes_midway_is_an_error(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a wait: the work would go on for minutes."""
    layers = 0 if verb == "put" else PUSH.layers
    work = replace(PUSH, verb=verb, count=100_000, layers=layers)
    begin, done = OpsRound._begin, asyncio.Event()

    async def counted(moves: OpsRound, number: int) -> None:
        await begin(moves, number)
        done.set()

    monkeypatch.setattr(OpsRound, "_begin", counted)
    with serving() as (address, process):
        async with measuring(Address.parse(address)) as ask:
            asking = asyncio.ensure_future(ask(work))
            await done.wait()
            process.kill()
            with pytest.raises(BenchError, match="the other side has ended"):
                await asking


async def begin_round(channel: ConnectionChannel, **changed: Any) -> Any:
    """Have a push be expected that never comes; returns what the peer answers."""
    asked = {"work": asdict(PUSH) | changed, "checks": False}
    await channel.send(asked)
    return await channel.receive()


async def until_it_ends(channel: ConnectionChannel) -> Any:
    """Return what the peer sends last."""
    last = None
    with contextlib.suppress(EOFError):
        while True:
            last = await channel.receive()
    return last


async def test_a_peer_that_vanishes_midway_leaves_room_for_the_next() -> None:
    async with served() as (address, ended):
        async with connected(address) as channel:
            assert await begin_round(channel) is None
        async with measuring(address) as ask:
            assert not (await ask(PUSH, checks=True)).damage
    assert len(ended) == 2


async def test_two_peers_take_turns() -> None:
    """A round waits for that of another peer, whatever this one does."""
    async with served() as (address, _), measuring(address) as ask:
        async with connected(address) as channel:
            assert await begin_round(channel) is None
            second = asyncio.ensure_future(ask(PUSH))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(second), 0.1)
        assert len((await second).seconds) == 1


async def test_a_round_that_does_not_end_is_over_after_its_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer, "TURN_S", 0.5)
    async with (
        served() as (address, _),
        measuring(address) as ask,
        connected(address) as channel,
    ):
        assert await begin_round(channel) is None
        assert len((await ask(PUSH)).seconds) == 1
        assert list(await until_it_ends(channel)) == ["error"]
    assert "TimeoutError" in caplog.text


async def test_an_end_that_fails_is_not_that_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(b: ServedBench) -> None:
        raise OSError("no way back")

    monkeypatch.setattr(peer, "BENCH_PEERS_MAX", 1)
    monkeypatch.setattr(ServedBench, "close", failing)
    async with served() as (address, ended):
        for _ in range(2):
            async with measuring(address) as ask:
                assert (await ask(PUSH)).cpu_s[1] > 0
    assert len(ended) == 2
    assert sum(record.exc_info is not None for record in caplog.records) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"nbytes": 0},
        {"nbytes": 3 * MIB},
        {"count": -1},
        {"blocks": 0},
        {"layers": KV_LAYERS_MAX + 1},
        {"spread": 3},
        {"in_flight": BENCH_IN_FLIGHT_MAX + 1},
        {"layers": 4096, "blocks": BENCH_FRAGMENTS_MAX},
        {"nbytes": "1"},
        {"nbytes": 2**80},
    ],
)
async def test_a_work_beyond_the_limits_is_refused(changed: dict[str, Any]) -> None:
    async with served() as (address, _):
        async with connected(address) as channel:
            assert list(await begin_round(channel, **changed)) == ["error"]
            with pytest.raises(EOFError):
                await channel.receive()
        async with connected(address) as channel:
            assert await begin_round(channel) is None


@pytest.mark.parametrize(
    "sent",
    [
        {"call": "close", "arguments": {}},
        {"program": "os:getpid", "work": 1, "checks": False},
        {"work": {"verb": "push"}, "checks": False},
        ["work"],
    ],
)
async def test_anything_but_work_ends_the_connection(
    sent: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as (address, ended):
        async with connected(address) as channel:
            await channel.send(sent)
            assert list(await until_it_ends(channel)) == ["error"]
        assert caplog.records
    assert len(ended) == 1


async def test_a_peer_that_sends_too_much_or_nothing_is_shown_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as (address, ended):
        async with connected(address) as channel:
            with pytest.raises(kvwire.KVWireError):
                await channel.send("x" * BENCH_CALL_BYTES_MAX)
        assert "MessageTooLarge" in caplog.text
        monkeypatch.setattr(peer, "PATIENCE_S", 0)
        async with connected(address) as channel:
            assert list(await channel.receive()) == ["error"]
        assert "TimeoutError" in caplog.text
    assert len(ended) == 2
