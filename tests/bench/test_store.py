"""Who stands beside the tiers of a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvwire.cli.bench.store import store
from kvwire.cli.main import main
from tests.bench.__main__ import app
from tests.bench.store import beside
from tests.cli.bench.test_store import choice

BESIDE = {
    "memory 64 KiB put": {"memcpy"},
    "memory 4 KiB match": {"dict"},
    "disk 64 KiB put": {"file", "memcpy"},
    "disk 64 KiB put, flushed": {"file"},
    "server over tcp 64 KiB get": {"transfer tcp", "sockets"},
    "server over tcp 4 KiB match": {"sockets"},
    "object 64 KiB get of one": {"obstore"},
}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_everybody_is_measured(tmp_path: Path) -> None:
    """One round; whoever stands beside a tier has moved the same bytes."""
    pytest.importorskip("obstore", reason="needs obstore: pip install obstore")
    out = tmp_path / "found.json"
    arguments = ["--blocks", "small", "--rounds", "1", "--round-mib", "4"]
    arguments += ["--transport", "tcp", "--json", str(out)]
    assert main(["store", *arguments, "--directory", str(tmp_path)], app) == 0
    cases = json.loads(out.read_text())["cases"]
    assert not [case["failures"] for case in cases if case["failures"]]
    found = {
        f"{case['group']} {case['name']}": set(case["contenders"]) for case in cases
    }
    for name, others in BESIDE.items():
        ours = {who for who in found[name] if who.startswith("kvwire ")}
        assert len(ours) == 1
        assert found[name] - ours - {"redis"} == others


def test_both_transports_to_a_server_stand_beside_one_pair_of_sockets(
    tmp_path: Path,
) -> None:
    chosen = choice(tmp_path, tiers=["server"], transports=["tcp", "local"])
    found = store(chosen, beside(chosen))
    everybody = {one for case in found.cases for one in case.contenders}
    names = [contender.name for contender in everybody]
    assert names.count("sockets") == 1
    assert {"transfer tcp", "transfer local"} < set(names)
