"""What a configuration asks for, and whether it is there."""

from __future__ import annotations

from pathlib import Path

import kvwire
from kvwire.backend import Finding
from kvwire.cli.doctor.requirements import asked
from kvwire.cli.doctor.transports import Transport
from kvwire.security.keys import write_key_file
from tests.support.certificates import FAR, Authority

TCP = Transport(name="tcp", available=True, reason="sockets")
UCX = Transport(
    name="ucx", available=False, reason="no libucp", remedy="pip install libucp"
)


def found(config: kvwire.Config, *transports: Transport) -> dict[str, Finding]:
    return {finding.name: finding for finding in asked(config, transports)}


def test_without_wishes_one_transport_is_enough() -> None:
    one = found(kvwire.Config(), TCP, UCX)["transports"]
    assert (one.state, one.text) == ("ok", "can run: tcp")


def test_without_any_transport() -> None:
    assert found(kvwire.Config())["transports"].state == "missing"


def test_a_required_transport_that_cannot_run() -> None:
    one = found(kvwire.Config(require=("ucx",)), TCP, UCX)["require"]
    assert (one.state, one.remedy) == ("missing", "pip install libucp")
    assert one.text == "cannot run here: ucx"


def test_one_of_the_required_is_enough() -> None:
    one = found(kvwire.Config(require=("ucx", "tcp")), TCP, UCX)["require"]
    assert (one.state, one.text) == ("ok", "can run: tcp")


def test_what_is_forbidden_does_not_count() -> None:
    one = found(kvwire.Config(forbid=("tcp",)), TCP, UCX)["transports"]
    assert one.state == "missing"


def test_a_name_that_nobody_offers() -> None:
    one = found(kvwire.Config(forbid=("ucxx",)), TCP, UCX)["names"]
    assert one.state == "missing"
    assert "did you mean 'ucx'?" in one.text
    assert found(kvwire.Config(), TCP)["names"].state == "ok"


def test_a_preferred_transport_that_cannot_run() -> None:
    one = found(kvwire.Config(prefer=("ucx",)), TCP, UCX)["prefer"]
    assert one.state == "warn"
    assert "ucx cannot run here" in one.text


def test_trust(tmp_path: Path) -> None:
    assert found(kvwire.Config(), TCP)["trust"].text == "loopback: this host only"
    key = tmp_path / "key"
    config = kvwire.Config(trust="psk", psk_file=str(key))
    one = found(config, TCP)["trust"]
    assert one.state == "missing"
    assert str(key) in one.text
    write_key_file(key)
    assert found(config, TCP)["trust"].state == "ok"


def test_certificates(tmp_path: Path) -> None:
    config = kvwire.Config(**Authority(tmp_path).config(FAR))
    one = found(config, TCP)["trust"]
    assert (one.state, one.text[:5]) == ("ok", "mtls:")
    Path(config.tls_key_file).unlink()
    one = found(config, TCP)["trust"]
    assert one.state == "missing"
    assert config.tls_key_file in one.text
