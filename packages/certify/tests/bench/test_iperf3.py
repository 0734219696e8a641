"""iperf3 as a contender: its report, its absence, and the real one where it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvwire import KVWireError
from kvwire.limits import GIB, MIB
from kvwire_certify.bench.command import TCP
from kvwire_certify.bench.pair import BenchError
from kvwire_certify.bench.turns import GIGABYTES_PER_SECOND
from kvwire_certify.bench.work import Work
from packages.certify.tests.bench import iperf3
from packages.certify.tests.bench.contenders import Scripted, benchmark, case
from packages.certify.tests.bench.peer import joined


def test_a_report_is_read() -> None:
    """Half a second for 2 GiB, and 150 % of a CPU; or why there is none."""
    end = {
        "sum_received": {"bytes": 2 * GIB, "seconds": 0.5},
        "cpu_utilization_percent": {"host_total": 90.0, "remote_total": 60.0},
    }
    seconds, cpu_s = iperf3.read_report(json.dumps({"end": end}))
    assert (seconds, cpu_s) == (0.25 / GIB, 0.375 / GIB)
    with pytest.raises(KVWireError, match="iperf3: server busy"):
        iperf3.read_report('{"error": "server busy"}')


def test_it_stands_beside_rates_or_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = Scripted("kvwire")
    whole = benchmark(case(ours), case(ours, unit=GIGABYTES_PER_SECOND))
    monkeypatch.setattr(iperf3, "missing", lambda: None)
    cases = joined(whole, ["iperf3"], [], TCP).cases
    names = [[one.name for one in case.contenders] for case in cases]
    assert names == [["kvwire"], ["kvwire", "iperf3"]]
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    (absent,) = joined(whole, ["iperf3"], [], TCP).missing
    assert "apt-get install iperf3" in absent.remedy
    fake = tmp_path / "iperf3"
    fake.write_text("#!/bin/sh\necho cannot bind\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(BenchError, match="cannot bind"):
        iperf3.contender().start()


@pytest.mark.skipif(
    shutil.which("iperf3") is None, reason="iperf3 is not installed here"
)
@pytest.mark.parametrize("verb", ["send", "get"])
def test_the_real_one(verb: str) -> None:
    with iperf3.contender().start() as pair:
        sample = pair.turn(Work(verb=verb, nbytes=MIB, count=1))
        assert pair.facts["version"].startswith("iperf 3")
    assert sample.seconds[0] > 0
    assert sum(sample.cpu_s) > 0
