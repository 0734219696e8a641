"""Benchmarks with a peer: two processes over loopback, and what a peer may not do."""

from __future__ import annotations

import asyncio
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
from kvwire.cli.bench.operations import OpsWork
from kvwire.cli.bench.pair import BenchError
from kvwire.cli.bench.peer import PROFILE, PeerSide, ServedSide, attend
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
        for name, cases in (("fragments --sizes-kib 4", 4), ("messages", 4)):
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
    assert "128 MiB of memory are more than the 1 MiB that this side has" in printed


def test_an_address_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "messages", "--peer", "no port"]) == CALLED_WRONG
    assert "no port" in capsys.readouterr().err


# --- one that serves in this process --------------------------------------------------


@asynccontextmanager
async def served(
    profile: dict[str, str] = PROFILE,
) -> AsyncIterator[tuple[Address, list[ServedSide]]]:
    """Where one listens that serves with 4 MiB, and the sides that are over."""
    ended: list[ServedSide] = []
    async with kvwire.open(profile=profile, require=("tcp",)) as there:
        address = await there.listen("127.0.0.1:0")
        attending = asyncio.create_task(
            attend(
                there,
                partial(ServedSide, memory_bytes_max=4 * MIB),
                ended.append,
            )
        )
        yield address, ended
        await there.close()
        await attending


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[PeerSide]:
    side = PeerSide({"transport": "tcp", "peer": str(address)})
    await side.connect(None)
    yield side
    await side.close()


async def test_a_peer_of_another_version_is_named() -> None:
    async with served({"kvwire.bench": "0"}) as (address, _):
        side = PeerSide({"transport": "tcp", "peer": str(address)})
        with pytest.raises(BenchError, match="no `kvwire bench serve` of this version"):
            await side.connect(None)
        await side.close()


@pytest.mark.parametrize("verb", ["push", "pull", "put", "get"])
async def test_a_peer_that_vanishes_midway_is_an_error(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a wait: the work would go on for minutes."""
    work = replace(PUSH, verb=verb, count=100_000)
    with serving() as (address, process):
        async with connected(Address.parse(address)) as side:
            await side.use(work, None)
            begin, done = side._begin, asyncio.Event()

            async def counted(work: OpsWork, connection: kvwire.Connection) -> None:
                await begin(work, connection)
                done.set()

            monkeypatch.setattr(side, "_begin", counted)
            driving = asyncio.create_task(side.drive(work))
            await done.wait()
            process.kill()
            with pytest.raises(kvwire.ConnectionClosed):
                await driving


async def begin_serving(side: PeerSide) -> None:
    """Have a push be expected that never comes."""
    asked = {"call": "serve", "arguments": {"work": asdict(PUSH)}}
    await side.connection.send(peer.CALL_TAG, json.dumps(asked).encode())
    assert await side.connection.recv(1) == b""


async def test_who_vanishes_midway_leaves_room_for_the_next() -> None:
    async with served() as (address, ended):
        async with connected(address) as side:
            await side.use(PUSH, None)
            await begin_serving(side)
        async with connected(address) as side:
            await side.use(PUSH, None)
            await side.fill(PUSH)
            assert await side.drive(PUSH)
            assert await side.digest(PUSH)
    assert len(ended) == 2


async def test_two_peers_take_turns() -> None:
    """A round waits for that of another peer, whatever this one does."""
    async with (
        served() as (address, _),
        connected(address) as one,
        connected(address) as two,
    ):
        for side in (one, two):
            await side.use(PUSH, None)
        await begin_serving(one)
        second = asyncio.create_task(two.drive(PUSH))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(second), 0.1)
        one.connection.abort()
        assert len(await second) == 1


async def test_a_call_that_does_not_end_is_over_after_its_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer, "TURN_S", 0.5)
    async with (
        served() as (address, _),
        connected(address) as one,
        connected(address) as two,
    ):
        for side in (one, two):
            await side.use(PUSH, "")
        await begin_serving(one)
        assert len(await two.drive(PUSH)) == 1
        await one.connection.wait_closed()
    assert "TimeoutError" in caplog.text


async def test_an_end_that_fails_is_not_that_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(side: ServedSide) -> None:
        raise OSError("no way back")

    monkeypatch.setattr(peer, "BENCH_PEERS_MAX", 1)
    monkeypatch.setattr(ServedSide, "take_back", failing)
    async with served() as (address, ended):
        for _ in range(2):
            async with connected(address) as side:
                assert await side.cpu() > 0
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
    async with served() as (address, _), connected(address) as side:
        for call in ("prepare", "serve"):
            with pytest.raises(BenchError, match=f"the peer could not {call}: "):
                await side.call(call, work=asdict(PUSH) | changed)
        await side.use(PUSH, None)


async def test_only_calls_of_a_right_side_are_done() -> None:
    async with served() as (address, _), connected(address) as side:
        for call in ("connect", "listen", "drive", "close", "__init__", "take_back"):
            with pytest.raises(BenchError, match=f"there is no call '{call}'"):
                await side.call(call)
        await side.connection.send(peer.CALL_TAG, b"{")
        said = await side.connection.recv(peer.ANSWER_TAG)
        assert b"DecodeError" in said
        assert await side.cpu() > 0


async def test_who_sends_too_much_or_nothing_is_shown_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as (address, ended):
        async with connected(address) as side:
            with pytest.raises(kvwire.KVWireError):
                await side.call("cpu", more="x" * BENCH_CALL_BYTES_MAX)
            await side.connection.wait_closed()
        assert "MessageTooLarge" in caplog.text
        monkeypatch.setattr(peer, "PATIENCE_S", 0)
        async with connected(address) as side:
            await side.connection.wait_closed()
        assert "TimeoutError" in caplog.text
    assert len(ended) == 2
