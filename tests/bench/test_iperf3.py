"""iperf3 as a contender: its report, its absence, and the real one where it is."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from kvwire import KVWireError
from kvwire.cli.bench.messages import messages
from kvwire.cli.bench.pair import BenchError, Work
from kvwire.cli.bench.side import HOST
from kvwire.limits import GIB, MIB
from tests.bench import iperf3

REPORT = {
    "end": {
        "sum_received": {"bytes": 2 * GIB, "seconds": 0.5},
        "cpu_utilization_percent": {"host_total": 90.0, "remote_total": 60.0},
    }
}


def test_a_report_is_read() -> None:
    # 150 % of half a second.
    expected = {"values": [4 * GIB], "moved_bytes": 2 * GIB, "cpu_s": 0.75}
    assert iperf3.read_report(json.dumps(REPORT)) == expected


@pytest.mark.parametrize(
    "text", ["", "not json", "{}", "[]", '{"end": {}}', '{"end": null}']
)
def test_no_report_is_an_error(text: str) -> None:
    with pytest.raises(KVWireError, match="no report"):
        iperf3.read_report(text)


def test_a_report_of_nothing_is_an_error() -> None:
    report = {"end": {**REPORT["end"], "sum_received": {"bytes": 0, "seconds": 0.5}}}
    with pytest.raises(KVWireError, match="nothing was received"):
        iperf3.read_report(json.dumps(report))


def test_what_iperf3_complains_about_is_passed_on() -> None:
    with pytest.raises(KVWireError, match="iperf3: server busy"):
        iperf3.read_report('{"error": "server busy"}')


def test_if_it_is_missing_the_remedy_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = iperf3.missing()
    assert absent is not None
    assert "apt-get install iperf3" in absent.remedy


def test_a_server_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "iperf3"
    fake.write_text("#!/bin/sh\necho cannot bind\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(BenchError, match="iperf3 ended: cannot bind"):
        iperf3.contender().start()


def test_a_free_port_is_no_one_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 20_000 <= iperf3.free_port() < 32_768
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(iperf3, "_PORTS", range(port, port + 1))
        with pytest.raises(KVWireError, match="no free port was found"):
            iperf3.free_port()


@pytest.mark.skipif(
    shutil.which("iperf3") is None, reason="iperf3 is not installed here"
)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("verb", ["send", "get"])
def test_the_real_one(verb: str) -> None:
    with iperf3.contender().start() as pair:
        sample = pair.round(Work(verb=verb, nbytes=MIB, count=1))
        assert pair.facts["version"].startswith("iperf 3")
    # What the receiver has seen when the sender is through may be a little less.
    assert sample.moved_bytes >= MIB
    assert sample.values[0] > 0
    assert sum(sample.cpu_s) > 0


def test_it_stands_beside_messages_or_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(iperf3, "missing", lambda: None)
    found = messages(
        transport="tcp", loop="uvloop", round_bytes=1, others=iperf3.installed()
    )
    assert [peer.name for peer in found.cases[1].contenders[1:]] == [
        "bare sockets",
        "iperf3",
    ]
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    others = iperf3.installed()
    found = messages(transport="tcp", loop="uvloop", round_bytes=1, others=others)
    assert [absent.name for absent in found.missing] == ["iperf3"]
    assert [peer.name for peer in found.cases[1].contenders[1:]] == ["bare sockets"]
