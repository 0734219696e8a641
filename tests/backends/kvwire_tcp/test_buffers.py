"""What the doctor says of the kernel's socket buffers, from made-up settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwire.backend import Finding
from kvwire_tcp import TcpBackend
from kvwire_tcp.buffers import findings


def look(root: Path, **settings: str) -> dict[str, Finding]:
    folder = root / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    for name, text in settings.items():
        (folder / name).write_text(f"{text}\n")
    return {finding.name: finding for finding in findings(root)}


def test_the_defaults_of_linux_are_in_order(tmp_path: Path) -> None:
    found = look(
        tmp_path,
        tcp_rmem="4096\t131072\t6291456",
        tcp_wmem="4096\t16384\t4194304",
        tcp_moderate_rcvbuf="1",
    )
    assert [finding.state for finding in found.values()] == ["ok", "ok"]
    assert "4 MiB, 33.6 Gbit/s" in found["send buffer"].text


def test_a_range_that_ends_early(tmp_path: Path) -> None:
    found = look(tmp_path, tcp_rmem="4096 87380 1048576", tcp_wmem="4096 16384 8388608")
    one = found["receive buffer"]
    assert (one.state, one.remedy) == (
        "warn",
        'sysctl net.ipv4.tcp_rmem="4096 87380 33554432"',
    )
    assert "at most 1 MiB, 8.39 Gbit/s" in one.text
    assert found["send buffer"].state == "ok"


def test_autotuning_that_is_off(tmp_path: Path) -> None:
    found = look(tmp_path, tcp_rmem="4096 131072 33554432", tcp_moderate_rcvbuf="0")
    one = found["receive buffer"]
    assert (one.state, one.remedy) == ("warn", "sysctl net.ipv4.tcp_moderate_rcvbuf=1")
    assert "stays at 0.125 MiB" in one.text


@pytest.mark.parametrize("text", ["", "4096 131072", "a b c"])
def test_what_is_not_linux_has_nothing_to_say(tmp_path: Path, text: str) -> None:
    assert look(tmp_path, tcp_rmem=text) == {}


def test_the_backend_tells_the_doctor() -> None:
    assert TcpBackend.diagnose() == findings()
