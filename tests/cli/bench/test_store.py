"""``kvwire bench store``, from the command line to what it writes, on few blocks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvwire.cli.bench import store as plan
from kvwire.cli.bench import store_side
from kvwire.cli.bench.store import TIERS, StoreChoice, filesystem, store
from kvwire.cli.bench.store_side import can_drop
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.extras import install_command
from kvwire.limits import MIB

# Starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(180)


def test_everything_is_measured_and_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sides: str,
) -> None:
    """One round; every row has a sample of everybody, and nothing is left behind.

    The other tiers' works are those of test_store_side and test_store_peers.
    """
    whole = sides == "processes"
    if whole:
        pytest.importorskip("obstore", reason="needs obstore: pip install obstore")
    monkeypatch.setattr(plan, "QUICK_ROUNDS", 1)
    # Of 8 MiB a set has more blocks than are got one by one.
    monkeypatch.setattr(plan, "QUICK_MIB", 4 if whole else 8)
    monkeypatch.setenv("COLUMNS", "80")
    out, plot, place = (tmp_path / name for name in ("json", "found.svg", "place"))
    place.mkdir()
    arguments = ["--tiers", "all" if whole else "memory", "--quick"]
    arguments += ["--transport", "tcp", "--blocks", "small"]
    arguments += ["--directory", str(place), "--json", str(out), "--plot", str(plot)]
    assert main(["bench", "store", *arguments]) == 0

    printed = capsys.readouterr().out
    tiers = ("memory", "disk", "server over tcp", "object")
    for tier in tiers if whole else tiers[:1]:
        assert f"kvwire bench store {tier}" in printed
    assert max(map(len, printed.splitlines())) <= 80
    found = json.loads(out.read_text())
    rows = {
        f"{row['group']}, {row['name']}": set(row["contenders"])
        for row in found["cases"]
    }
    everything = expected(cold=can_drop(place))
    assert rows == {
        name: who for name, who in everything.items() if whole or "memory" in name
    }
    for row in found["cases"]:
        assert not row["failures"]
        for samples in row["contenders"].values():
            assert samples["median"] > 0
    assert found["settings"]["filesystem"]
    if whole:
        assert found["contenders"]["kvwire server tcp"]["KVWIRE_REQUIRE"] == "tcp"
    assert list(place.iterdir()) == []
    for picture in (plot, tmp_path / "found-times.svg"):
        assert ET.parse(picture).getroot().tag.endswith("svg")


def expected(*, cold: bool) -> dict[str, set[str]]:
    """Rows, and who is in them."""
    verbs = {
        "memory": ("put", "put, new memory", "get", "get of one"),
        "disk": ("put", "put, flushed", "get", *["get, cold"] * cold, "get of one"),
        "server over tcp": ("put", "get", "get of one"),
        "object": ("put", "get", "get of one"),
    }
    rows = {
        f"{tier}, 64 KiB {verb}": tier for tier in verbs for verb in verbs[tier]
    } | {f"{tier}, 4 KiB match": tier for tier in verbs if tier != "object"}
    return {
        name: {"kvwire " + tier.replace("over ", "")} for name, tier in rows.items()
    }


def test_the_file_system_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "filesystem", lambda _: "zfs on tank")
    monkeypatch.setattr(store_side, "can_drop", lambda _: False)
    notes = "\n".join(store(choice(tmp_path, tiers=["disk"])).notes)
    assert "zfs on tank" in notes
    assert "No cold get" in notes


def test_without_obstore_the_object_tier_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "find_spec", lambda _: None)
    # Not beside a server's, where redis-server may be missing too.
    (missing,) = store(choice(tmp_path, tiers=["memory", "object"])).missing
    remedy = install_command("store")
    assert (missing.name, missing.remedy) == ("the object tier", remedy)
    assert main(["bench", "store", "--tiers", "object"]) == CALLED_WRONG
    assert f"needs obstore: {remedy}" in capsys.readouterr().err


def test_a_disk_without_room_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    arguments = ["--tiers", "disk", "--directory", str(tmp_path)]
    assert main(["bench", "store", *arguments]) == CALLED_WRONG
    assert f"{MIB} bytes are free, and" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def choice(directory: Path, **changed: Any) -> StoreChoice:
    options: dict[str, Any] = {
        "tiers": list(TIERS),
        "transports": ["tcp"],
        "shapes": ["small"],
        "directory": directory,
        "round_bytes": 4 * MIB,
        "loop": "asyncio",
        **changed,
    }
    return StoreChoice(**options)


LINE = "{} {} {} rw,noatime 0 0"


def mounted(tmp_path: Path, *mounts: tuple[Path, str, str]) -> Path:
    file = tmp_path / "mounts"
    lines = [
        LINE.format(device, str(where).replace(" ", r"\040"), kind)
        for where, kind, device in mounts
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_the_nearest_mount_counts_and_of_two_the_later(tmp_path: Path) -> None:
    inner = tmp_path / "kv store"
    inner.mkdir()
    mounts = mounted(
        tmp_path,
        (inner, "xfs", "/dev/nvme0n1"),
        (Path("/"), "ext3", "/dev/vda"),
        (Path("/"), "ext4", "/dev/vda"),
        (Path(f"{inner}er"), "tmpfs", "none"),
    )
    assert filesystem(inner, mounts) == "xfs on /dev/nvme0n1"
    assert filesystem(tmp_path, mounts) == "ext4 on /dev/vda"


def test_nothing_is_known_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert "not name" in filesystem(tmp_path, tmp_path / "missing")
    assert "unknown" in filesystem(tmp_path, mounted(tmp_path))
