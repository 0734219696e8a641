"""Whom a request may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwire import UsageError
from kvwire.config import Config
from kvwire.security.keys import write_key_file
from kvwire_vllm.metadata import TransferParams, answer
from kvwire_vllm.references import UNSIGNED, References

KEY, OTHER = b"k" * 32, b"o" * 32
REMOTE = ("10.0.0.7:7400", "10.0.0.7:7401")


def refused(references: References, wanted: TransferParams) -> bool:
    try:
        references.check(wanted.transfer_id, wanted.remote, wanted.signature)
    except UsageError:
        return True
    return False


def signed(key: bytes) -> TransferParams:
    return TransferParams.read(References([key]).signed(answer("t", REMOTE)))


def test_whoever_has_the_key_may_name_anybody() -> None:
    assert not refused(References([KEY]), signed(KEY))
    assert not refused(References([OTHER, KEY]), signed(KEY)), "keys are replaced"
    assert refused(References([KEY]), signed(OTHER))
    assert refused(UNSIGNED, signed(KEY))


def test_the_error_names_the_address() -> None:
    with pytest.raises(UsageError, match="'tcp://a:1' is not in `peers`"):
        UNSIGNED.check("t", ["a:1"], "")


def test_what_nobody_can_dial_is_refused_from_friends_too() -> None:
    anywhere = "tcp://0.0.0.0:7400"
    with pytest.raises(UsageError, match="every interface"):
        References([KEY], peers=[anywhere]).check("t", [anywhere], "")


@pytest.mark.parametrize(
    "change",
    [
        {"transfer_id": "u"},
        {"remote": ["10.0.0.8:7400", "10.0.0.7:7401"]},
        {"remote": ["10.0.0.7:7401", "10.0.0.7:7400"]},
        {"remote": ["10.0.0.7:7400"]},
        {"signature": ""},
        {"signature": "0" * 64},
    ],
)
def test_a_reference_that_was_changed(change: dict[str, object]) -> None:
    params = References([KEY]).signed(answer("t", REMOTE))
    assert refused(References([KEY]), TransferParams.read({**params, **change}))


def test_peers_need_no_signature() -> None:
    listed = References([KEY], peers=REMOTE)
    assert not refused(listed, TransferParams.read(answer("t", REMOTE)))
    assert refused(listed, TransferParams.read(answer("t", ("10.0.0.7:7402",))))


@pytest.mark.parametrize(
    ("address", "believed"),
    [
        ("127.0.0.1:9", True),
        ("[::1]:9", True),
        ("localhost:9", True),
        ("10.0.0.7:9", False),
        ("example.org:9", False),
        ("unix:///run/x", False),
    ],
)
def test_without_keys_and_peers_this_host_is_believed(
    address: str, believed: bool
) -> None:
    wanted = TransferParams.read(answer("t", (address,)))
    found = References.of(Config.load(), ())
    assert refused(found, wanted) is not believed
    assert refused(References.of(Config.load(), ["127.0.0.1:8"]), wanted)


def test_what_an_engine_is_configured_with(tmp_path: Path) -> None:
    key = tmp_path / "key"
    write_key_file(key)
    config = Config.load(trust="psk", psk_file=str(key))
    engine = References.of(config, ())
    params = engine.signed(answer("t", REMOTE))
    assert not refused(References.of(config, ()), TransferParams.read(params))
    local = TransferParams.read(answer("t", ("127.0.0.1:9",)))
    assert refused(engine, local), "a key proves more than being here"
    assert UNSIGNED.signed(answer("t", REMOTE)) == answer("t", REMOTE)


def test_certificates_sign_no_request() -> None:
    config = Config.load(
        trust="mtls",
        tls_ca_file="a",
        tls_cert_file="b",
        tls_key_file="c",
        tls_peers=["x"],
    )
    with pytest.raises(UsageError, match='needs "peers"'):
        References.of(config, ())
