"""``kvwire bench`` from the command line to what it writes, and what it refuses.

Each benchmark runs once, as small as it gets: its sides are threads here, and processes
where it is marked slow.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvwire.backend import Availability, Capabilities, registry
from kvwire.cli.bench import fragments, many, ops, overlap, store
from kvwire.cli.bench.store import can_drop
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.limits import KIB, MIB
from kvwire_local import LocalBackend

Document = dict[str, Any]


class Run(NamedTuple):
    """A command, and what it has to say."""

    arguments: str
    # Names of rows, with their group before, and who is in each.
    rows: Mapping[str, set[str]]
    # Of what it prints.
    says: list[str]
    # Makes it smaller.
    smaller: dict[tuple[Any, str], Any]
    checked: Callable[[Document], None] = lambda _: None


def each(names: list[str], *who: str) -> dict[str, set[str]]:
    return {name: set(who) for name in names}


def many_counts_by_size(found: Document) -> None:
    assert found["contenders"]["kvwire tcp"]["connections"] == 4
    at_once = [r["contenders"]["kvwire tcp"]["count"] for r in found["cases"][-3:]]
    assert at_once == [15, 4, 1]


def operations_have_their_cpu(found: Document) -> None:
    assert list(found["cpu_s"]) == [row["name"] for row in found["cases"]]
    assert all(min(sides) > 0 for sides in found["cpu_s"].values())


def efficiencies_are_judged(found: Document) -> None:
    layers = [row["work"]["layers"] for row in found["cases"]]
    assert layers == [2, 2, 4, 4, 32, 2, 4, 80, 80, 80]
    assert len(found["efficiencies"]) == 5
    assert len(found["taken_s"]) == 3


VERBS = ("send", "put", "get")
TCP = "TCP 4 KiB {}, {}"
HERE = "same host 4 KiB {}, {}"
WAYS = [(v, how) for v in fragments.VERBS for how in ("per-layer", "cross-layer")]
EXPOSED = "exposed after the last mark"

RUNS = {
    "messages": Run(
        "--round-mib 1",
        each(["64 B round trip"], "kvwire", "uvloop streams")
        | each(
            [f"{size} KiB {verb}" for size in (64, 256) for verb in VERBS],
            *("kvwire", "bare sockets"),
        ),
        ["64 B round trip, us", "ratio"],
        {(ops, "SIZES"): (64 * KIB, 256 * KIB)},
    ),
    "setup": Run(
        "",
        each([f"tcp {name}" for name in ops.COLUMNS], "kvwire tcp", "uvloop streams"),
        ["tcp first transfer, us"],
        {(ops, "CONNECTIONS"): 3},
    ),
    "fragments": Run(
        "--transport tcp --sizes-kib 4 --round-mib 2",
        each([TCP.format(*way) for way in WAYS], "kvwire tcp"),
        ["kvwire bench fragments TCP", "4 KiB push, per-layer, GB/s"],
        {},
    ),
    "many": Run(
        "--endpoints 2 --transfers 20 --large-mib 2 --others 2 --other-mib 2",
        each(
            [
                "one by one 1 MiB alone",
                "beside 1 MiB beside 2 x 2 MiB",
                "beside 1 MiB beside 2 x 2 MiB, priority 1",
                "one by one 64 KiB alone",
                *(f"at once 20 at once: {s}" for s in ("64 KiB", "1 MiB", "2 MiB")),
            ],
            "kvwire tcp",
        ),
        ["2 x 2 connections.", "kvwire tcp, 1 MiB beside 2 x 2 MiB: p99 "],
        {(many, "TIMED"): 5},
        many_counts_by_size,
    ),
    "ops": Run(
        "",
        each([*ops.operations(), *ops.store_operations()], "kvwire tcp")
        | each(["round trip, 64 B"], "kvwire tcp", "uvloop streams"),
        ["of the other side", "uvloop streams", "round trip, 64 B, us"],
        {(ops, "COUNT"): 3},
        operations_have_their_cpu,
    ),
    "overlap": Run(
        "--layers 2 4 --layer-kib 128",
        each(
            [
                *(
                    f"{EXPOSED} {count} layers, {name} is longer"
                    for count in (2, 4)
                    for name in ("compute", "transfer")
                ),
                f"{EXPOSED} a short prompt",
            ],
            *("streamed", "whole", "one layer"),
        )
        | each(
            [
                *(
                    f"from the first mark {count} layers, no compute"
                    for count in (2, 4)
                ),
                *(
                    f"{overlap.GROUPS[overlap.TAKEN]} 80 layers of {kib} KiB"
                    for kib in overlap.PASS_KIB
                ),
            ],
            *("streamed", "whole"),
        ),
        [EXPOSED, "efficiency", "taken from a pass by each layer, us"],
        {},
        efficiencies_are_judged,
    ),
    "store": Run(
        # Of 8 MiB a set has more blocks than are got one by one.
        "--tiers memory --blocks small --quick",
        each(
            [
                *(f"memory 64 KiB {v}" for v in ("put", "get")),
                "memory 64 KiB get of one",
                *(f"memory 4 KiB match{of}" for of in ("", " of one")),
            ],
            "kvwire memory",
        ),
        ["kvwire bench store memory", "128 blocks of 16 fragments of 4 KiB, scattered"],
        {(store, "QUICK_ROUNDS"): 1},
    ),
}


def document(arguments: list[str], tmp_path: Path) -> Document:
    """Run a command; every row has a sample of everybody."""
    out = tmp_path / "found.json"
    assert main([*arguments, "--json", str(out)]) == 0
    found: Document = json.loads(out.read_text())
    for row in found["cases"]:
        assert not row["failures"]
        for samples in row["contenders"].values():
            assert 0 < samples["low"] <= samples["median"] <= samples["high"]
            assert len(samples["rounds"]) == 1
        others = {name for name in row["contenders"] if "kvwire" not in name}
        assert (row["ratio"] is not None) >= bool(others - {*overlap.WAYS})
    return found


def rows(found: Document) -> dict[str, set[str]]:
    return {
        f"{row['group']} {row['name']}".strip(): set(row["contenders"])
        for row in found["cases"]
    }


@pytest.mark.usefixtures("sides")
@pytest.mark.parametrize("name", RUNS)
def test_everything_is_measured_and_written(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RUNS[name]
    for (module, constant), value in run.smaller.items():
        monkeypatch.setattr(module, constant, value)
    rounds = [] if "--quick" in run.arguments else ["--rounds", "1"]
    found = document(["bench", name, *run.arguments.split(), *rounds], tmp_path)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    for said in run.says:
        assert said in printed
    assert found["benchmark"] == name
    assert rows(found) == run.rows
    reports = [str(facts.get("transport")) for facts in found["contenders"].values()]
    assert name == "store" or any("taken" in said for said in reports)
    run.checked(found)


@pytest.mark.slow
def test_one_host_is_measured_by_processes_beside_a_memcpy(tmp_path: Path) -> None:
    size = ["--sizes-kib", "4", "--round-mib", "2", "--rounds", "1"]
    found = document(["bench", "fragments", "--transport", "local", *size], tmp_path)
    ours = {"kvwire local", "kvwire local arena"}
    assert rows(found) == {
        HERE.format(verb, how): ours | ({"memcpy"} if how == "per-layer" else set())
        for verb, how in WAYS
    }


@pytest.mark.slow
@pytest.mark.skipif(find_spec("obstore") is None, reason="needs obstore")
def test_every_tier_is_measured_by_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    arguments = ["--transport", "tcp", "--blocks", "small", "--directory", str(place)]
    arguments += ["--rounds", "1", "--round-mib", "4"]
    found = document(["bench", "store", *arguments], tmp_path)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    cold = ["get, cold"] * can_drop(place)
    verbs = {
        "memory": ("put", "get", "get of one"),
        "disk": ("put", "put, flushed", "get", *cold, "get of one"),
        "server over tcp": ("put", "get", "get of one"),
        "object": ("put", "get", "get of one"),
    }
    assert rows(found) == {
        f"{tier} {row}": {"kvwire " + tier.replace("over ", "")}
        for tier in verbs
        for row in (
            *(f"64 KiB {verb}" for verb in verbs[tier]),
            *["4 KiB match", "4 KiB match of one"] * (tier != "object"),
        )
    }
    assert found["settings"]["filesystem"]
    assert found["contenders"]["kvwire server tcp"]["KVWIRE_REQUIRE"] == "tcp"
    assert list(place.iterdir()) == []


# --- what is refused, and what cannot run here ----------------------------------------

NOBODY = "--transport pigeons: no such backend"
ONE_PROCESS = "--transport inproc: joins two loops of one process"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *(
            (f"{name} --transport pigeons", NOBODY)
            for name in ("messages", "overlap", "many", "ops", "setup", "store")
        ),
        ("fragments --transport pigeons", "--transport pigeons: "),
        ("fragments --layout cross-layer --sizes-kib 1024", "sizes of up to 64 KiB"),
        ("messages --transport inproc", ONE_PROCESS),
        ("messages --rounds 0", "--rounds"),
        ("messages --loop trio", "--loop"),
        ("messages --round 1", "--round"),
        ("overlap --layer-kib 65", "a multiple of 64"),
        ("store --tiers tape", "--tiers tape: choose from memory, disk, server,"),
        ("store --directory /no/such", "/no/such: there is no such"),
        ("store --round-mib 1", "Must be >= 4"),
        ("store --blocks huge", '"huge"'),
    ],
)
def test_what_is_refused(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments.split()]) == CALLED_WRONG
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_disk_without_room_and_objects_without_obstore_are_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    arguments = ["bench", "store", "--directory", str(tmp_path), "--tiers"]
    assert main([*arguments, "disk"]) == CALLED_WRONG
    assert f"{MIB} bytes are free and" in capsys.readouterr().err
    monkeypatch.setattr(store, "find_spec", lambda _: None)
    assert main([*arguments, "object"]) == CALLED_WRONG
    assert "needs obstore: pip install" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["messages", "overlap"])
def test_a_transport_that_is_a_lane_is_measured_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "SIZES", (MIB,))
    smaller = {"messages": "--round-mib 1", "overlap": "--layers 2 --layer-kib 64"}
    options = f"--transport local --rounds 1 {smaller[name]}"
    found = document(["bench", name, *options.split()], tmp_path)
    assert any("taken" in str(one) for one in found["contenders"].values())


@pytest.mark.usefixtures("threads")
def test_a_transport_that_fails_is_named_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWIRE_FORBID", "tcp")
    arguments = ["--transport", "tcp", "--sizes-kib", "4"]
    assert main(["bench", "fragments", *arguments, "--round-mib", "1"]) == 1
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
    work = fragments.work_of("push", 4 * KIB, cross_layer=False, round_bytes=MIB)

    def missing() -> list[str]:
        return [
            str(one)
            for one in fragments.fragments(["local"], [work], "asyncio").missing
        ]

    assert len(missing()) == bool(said)
    assert said in "".join(missing())
    found = Availability(available=False, reason="no GPU", remedy="buy one")
    monkeypatch.setattr(registry, "availability", lambda _: found)
    line = "kvwire local cannot run here and was left out: no GPU; buy one"
    assert missing() == [line]
