import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvwire.cli.bench.fragments import work_of
from kvwire.limits import KIB, MIB
from tests.bench.foreign import name_calls
from tests.bench.profile_side import FOREIGN
from tests.bench.profile_transfer import SIDES, asleep_s, main, render


def _profiled(tmp_path: Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "profile.json"
    main(["--mib", "1", "--rounds", "1", "--json", str(file), *options])
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_both_sides_say_where_their_time_went(tmp_path: Path) -> None:
    found = _profiled(tmp_path, "--transport", "tcp", "--kib", "64")
    assert found["rate"] > 0
    assert found["work"]["nbytes"] == 64 * KIB
    for side in SIDES:
        one = found[side]
        assert 0 < one["spent"]["wall_s"] >= asleep_s(one["spent"]) >= 0
        names = {row["name"] for row in one["functions"] if row["calls"]}
        assert "kvwire/driver/connection_driver.py ConnectionDriver.run" in names
        own_s = [row["own_s"] for row in one["functions"]]
        assert own_s == sorted(own_s, reverse=True)


@pytest.mark.slow
def test_calls_through_ctypes_have_their_names(tmp_path: Path) -> None:
    found = _profiled(tmp_path, "--transport", "local", "--kib", "64")
    foreign = {
        row["name"]: row["calls"]
        for row in found["left"]["functions"] + found["right"]["functions"]
        if row["kind"] == FOREIGN
    }
    assert foreign["process_vm_readv"] > 0


def test_a_function_with_a_name_is_still_that_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookup = ctypes.CDLL.__getitem__
    monkeypatch.setattr(ctypes.CDLL, "__getitem__", lookup)  # put back at the end
    name_calls()
    libc = ctypes.CDLL(None)
    libc.labs.restype, libc.labs.argtypes = ctypes.c_long, (ctypes.c_long,)
    assert libc.labs(-3) == 3
    assert type(libc.labs).__call__.__code__.co_name == "labs"
    with pytest.raises(AttributeError):
        libc.no_such_function  # noqa: B018


def test_the_tables_say_what_was_found() -> None:
    spent = {"wall_s": 0.5, "user_s": 0.1, "kernel_s": 0.2, "sleeps": 7}
    spent |= {"taken_away": 3, "page_faults": 0}
    row = {"kind": FOREIGN, "name": "ucp_worker_progress", "calls": 4, "own_s": 0.15}
    side = {"spent": spent, "profiled": spent, "functions": [row]}
    found = dict.fromkeys(SIDES, side)
    work = work_of("push", 64 * KIB, cross_layer=False, round_bytes=MIB)
    text = Console(width=100, color_system=None)
    with text.capture() as shown:
        rates = {"rate": 2e9, "rate_profiled": 1e9, "clock": "cpu"}
        text.print(render({"transport": "ucx: taken", **rates, **found}, work, 5))
    lines = [" ".join(line.split()) for line in shown.get().splitlines()]
    assert "asleep 200.00 ms 200.00 ms" in lines
    assert "ucp_worker_progress 150.00 50.0 4 256.0" in lines
    assert "all: elsewhere 150.00 50.0" in lines
