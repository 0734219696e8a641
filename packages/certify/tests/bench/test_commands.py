"""``kvwire bench`` from the command line to what it writes, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvwire.backend import Availability, Capabilities, registry
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.limits import KIB, MIB
from kvwire_certify.bench import command
from kvwire_certify.bench.command import fragments_of, operations, work_of
from kvwire_certify.bench.pair import placements
from kvwire_local import LocalBackend

Document = dict[str, Any]
VERBS = ("push", "pull", "get")
FRAGMENTS = [
    f"4 KiB {verb}, {layout}"
    for layout in ("per-layer", "cross-layer")
    for verb in VERBS
]


def document(arguments: str, tmp_path: Path) -> Document:
    """Run a command; every row has a sample of everybody, or a reason."""
    out = tmp_path / "found.json"
    options = ["--rounds", "1", "--json", str(out)]
    assert main(["bench", *arguments.split(), *options]) == 0
    found: Document = json.loads(out.read_text())
    for row in found["cases"]:
        assert row["failures"] == {}
        for samples in row["contenders"].values():
            assert samples["median"] > 0
    return found


def rows(found: Document) -> dict[str, set[str]]:
    return {row["name"]: set(row["contenders"]) for row in found["cases"]}


def test_messages_stand_beside_streams_and_sockets_in_both_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SIZES", (64 * KIB,))
    found = document("messages --round-mib 1", tmp_path)
    assert rows(found) == {
        "round trip, 64 B": {"kvwire tcp", "uvloop streams"},
        **{
            f"{verb}, 64 KiB": {"kvwire tcp", "bare sockets"}
            for verb in ("send", "put", "get")
        },
    }
    printed = capsys.readouterr().out
    for place, cpus in placements().items():
        here = [row for row in found["cases"] if row["placement"] == place]
        assert len(here) == 4
        assert all(row["cpus"] == [*cpus] and row["ratio"] > 0 for row in here)
        assert f"kvwire bench messages, {place}\n" in printed
    assert "round trip, 64 B, us" in printed


def test_each_operation_has_its_cpu_and_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "COUNT", 8)
    found = document("ops --placement same --loop asyncio", tmp_path)
    assert list(rows(found)) == [*operations()]
    for row in found["cases"]:
        beside = set() if row["work"]["verb"] == "ready" else {"asyncio streams"}
        assert set(row["contenders"]) == {"kvwire tcp", *beside}
        assert min(row["contenders"]["kvwire tcp"]["sides_cpu_s"]) > 0
        assert (row["ratio"] is not None) is bool(beside)
    assert "tcp: taken" in found["contenders"]["kvwire tcp"]["transport"]


def test_fragments_stand_beside_one_stream(tmp_path: Path) -> None:
    options = "--sizes-kib 4 --round-mib 2 --placement same --transport tcp"
    found = document(f"fragments {options}", tmp_path)
    assert rows(found) == {name: {"kvwire tcp", "bare sockets"} for name in FRAGMENTS}
    assert {row["group"] for row in found["cases"]} == {"TCP"}


@pytest.mark.slow
def test_fragments_of_one_host_stand_beside_a_memcpy(tmp_path: Path) -> None:
    options = "--sizes-kib 4 --round-mib 2 --placement same --transport local"
    found = document(f"fragments {options}", tmp_path)
    everybody = {"kvwire local", "kvwire local arena", "memcpy"}
    assert rows(found) == dict.fromkeys(FRAGMENTS, everybody)
    found = document("ops --placement same --transport local", tmp_path)
    in_arena = [name for name in rows(found) if name.endswith(", arena")]
    assert len(in_arena) == 2


# --- two hosts ------------------------------------------------------------------------


@contextmanager
def listening(arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a command that listens; yield its address."""
    given = [*arguments.split(), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvwire", "bench", *given],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[2].rstrip(";"), process
        finally:
            process.kill()


def test_another_host_is_measured_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "fragments --transport tcp --sizes-kib 64 --layout per-layer"
    with listening(options) as (address, process):
        found = document(f"{options} --peer {address}", tmp_path)
        assert rows(found) == {
            f"64 KiB {verb}, per-layer": {"kvwire tcp"} for verb in VERBS
        }
        assert {row["group"] for row in found["cases"]} == {f"to {address}"}
        (facts,) = found["contenders"].values()
        assert facts["peer"]["kvwire"] == found["kvwire"]
        for row in found["cases"]:
            (samples,) = row["contenders"].values()
            assert len(samples["sides_cpu_s"]) == 2

        other = options.replace("64", "4").split()
        assert main(["bench", *other, "--peer", address]) == 1
        assert "kvwire.bench" in capsys.readouterr().out
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        assert "served 'bench-left'" in said


# --- what is refused, and what cannot run here ----------------------------------------

NOBODY = "--transport pigeons: no such backend"
ONE_PROCESS = "--transport inproc: joins two loops of one process"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("messages --transport pigeons", NOBODY),
        ("ops --transport pigeons", NOBODY),
        ("fragments --transport tcp,pigeons", NOBODY),
        ("fragments --layout cross-layer --sizes-kib 1024", "sizes of up to 64 KiB"),
        ("messages --transport inproc", ONE_PROCESS),
        ("messages --rounds 0", "--rounds"),
        ("messages --loop trio", "--loop"),
        ("messages --round 1", "--round"),
        ("ops --peer 127.0.0.1:1 --listen 127.0.0.1:2", "pass one of them"),
        ("ops --peer nowhere", "nowhere"),
    ],
)
def test_what_is_refused(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments.split()]) == CALLED_WRONG
    assert says in " ".join(capsys.readouterr().err.split())


def test_one_cpu_has_one_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "placements", lambda: {"both on CPU 0": (0, 0)})
    assert main(["bench", "ops", "--placement", "apart"]) == CALLED_WRONG
    assert "may use one CPU only" in capsys.readouterr().err


def test_a_transport_that_fails_is_named_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWIRE_FORBID", "tcp")
    options = "--transport tcp --sizes-kib 4 --round-mib 1 --placement same --rounds 1"
    assert main(["bench", "fragments", *options.split()]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "kvwire tcp failed, 4 KiB push, per-layer and 5 more:" in printed
    assert "forbid" in printed


@pytest.mark.parametrize(
    ("capabilities", "said"),
    [
        (Capabilities(lanes=True), ""),
        (Capabilities(lanes=False), "no lanes"),
        (Capabilities(lanes=True, memory_kinds=frozenset()), "no host memory"),
    ],
)
def test_a_backend_that_cannot_take_part_is_left_out_with_its_reason(
    capabilities: Capabilities, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalBackend, "capabilities", capabilities)
    work = work_of("push", 4 * KIB, cross_layer=False, round_bytes=MIB)

    def missing() -> list[str]:
        return [str(one) for one in fragments_of(["local"], [work], "asyncio").missing]

    assert len(missing()) == bool(said)
    assert said in "".join(missing())
    found = Availability(available=False, reason="no GPU", remedy="buy one")
    monkeypatch.setattr(registry, "availability", lambda _: found)
    line = "kvwire local cannot run here and was left out: no GPU; buy one"
    assert missing() == [line]
