"""What every backend says, what a configuration asks for, and whether it is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

import kvwire
from kvwire.backend import Availability, Finding
from kvwire.cli.doctor.examination import Transport, asked, installed
from kvwire.security.keys import write_key_file
from kvwire_tcp import TcpBackend
from tests.support.certificates import FAR, Authority
from tests.support.plugged import plug_in

TCP = Transport(name="tcp", available=True, reason="sockets")
UCX = Transport(
    name="ucx", available=False, reason="no libucp", remedy="pip install libucp"
)


def asked_of(config: kvwire.Config, *transports: Transport) -> dict[str, Finding]:
    return {finding.name: finding for finding in asked(config, transports)}


@pytest.mark.parametrize(
    ("config", "name", "state", "text"),
    [
        ({}, "transports", "ok", "can run: tcp"),
        ({"require": ("ucx",)}, "require", "missing", "cannot run here: ucx"),
        ({"require": ("ucx", "tcp")}, "require", "ok", "can run: tcp"),
        ({"forbid": ("tcp",)}, "transports", "missing", "cannot run here: ucx"),
        (
            {"prefer": ("ucx",)},
            "prefer",
            "warn",
            "ucx cannot run here: the next preference is used",
        ),
    ],
)
def test_one_of_what_is_asked_for_is_enough(
    config: dict[str, Any], name: str, state: str, text: str
) -> None:
    one = asked_of(kvwire.Config(**config), TCP, UCX)[name]
    assert (one.state, one.text) == (state, text)
    assert one.remedy == (UCX.remedy if state == "missing" else "")


def test_a_name_that_nobody_offers() -> None:
    one = asked_of(kvwire.Config(forbid=("ucxx",)), TCP, UCX)["names"]
    assert one.state == "missing"
    assert "did you mean 'ucx'?" in one.text
    assert asked_of(kvwire.Config(), TCP)["names"].state == "ok"


def test_trust(tmp_path: Path) -> None:
    assert asked_of(kvwire.Config(), TCP)["trust"].text == "loopback: this host only"
    key = tmp_path / "key"
    config = kvwire.Config(trust="psk", psk_file=str(key))
    one = asked_of(config, TCP)["trust"]
    assert one.state == "missing"
    assert str(key) in one.text
    write_key_file(key)
    assert asked_of(config, TCP)["trust"].state == "ok"


def test_certificates(tmp_path: Path) -> None:
    config = kvwire.Config(**Authority(tmp_path).config(FAR))
    one = asked_of(config, TCP)["trust"]
    assert (one.state, one.text[:5]) == ("ok", "mtls:")
    Path(config.tls_key_file).unlink()
    one = asked_of(config, TCP)["trust"]
    assert one.state == "missing"
    assert config.tls_key_file in one.text


def test_certificates_that_peers_do_not_accept(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "another CA")
    for config, state, words in [
        (authority.config(FAR, days=(-9, -3)), "missing", "expired on .* 3 days ago"),
        (authority.config(FAR, days=(3, 9)), "missing", "not valid before"),
        (authority.config(FAR, days=(-87, 3)), "warn", "in 3 days: renew it"),
        (authority.config(FAR, days=(-10, 80)), "ok", "expires on .* in 80 days$"),
        (
            authority.config(
                FAR, days=(-10, 80), usages=(ExtendedKeyUsageOID.CLIENT_AUTH,)
            ),
            *("ok", "allows only a side that connects"),
        ),
        (
            authority.config(FAR) | other.issue(FAR, days=(-10, 80)).config,
            *("ok", "no CA in tls_ca_file has signed it"),
        ),
    ]:
        one = asked_of(kvwire.Config(**config), TCP)["trust"]
        assert one.state == state
        assert re.search(words, one.text)
        assert bool(one.remedy) is (state != "ok")


SLOW = Finding(name="buffers", state="warn", text="small", remedy="sysctl")


class Chatty(TcpBackend):
    scheme = "chatty"

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        return (SLOW,)


class Broken(TcpBackend):
    scheme = "broken"

    @classmethod
    def availability(cls) -> Availability:
        return Availability(available=False, reason="no device", remedy="buy one")

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        raise ZeroDivisionError("who would have thought")


def test_a_backend_tells_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {transport.name: transport for transport in installed()}
    assert {"inproc", "tcp"} <= set(found)
    assert found["tcp"].available
    plug_in(monkeypatch, tmp_path, "kvwire.backends", "chatty", f"{__name__}:Chatty")
    (transport,) = (one for one in installed() if one.name == "chatty")
    assert transport.findings == (SLOW,)


def test_a_backend_that_raises_is_shown_with_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plug_in(monkeypatch, tmp_path, "kvwire.backends", "broken", f"{__name__}:Broken")
    (transport,) = (one for one in installed() if one.name == "broken")
    assert not transport.available
    assert (transport.reason, transport.remedy) == ("no device", "buy one")
    (finding,) = transport.findings
    assert "ZeroDivisionError: who would have thought" in finding.text


def test_a_backend_that_cannot_be_loaded_has_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plug_in(monkeypatch, tmp_path, "kvwire.backends", "nobody", "nothing.here:Backend")
    (transport,) = (one for one in installed() if one.name == "nobody")
    assert not transport.available
    assert (
        "backend 'nobody', nothing.here:Backend, cannot be imported" in transport.reason
    )
    assert transport.findings == ()
