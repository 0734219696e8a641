"""What a request says of a transfer, whom it may name, and who is dialled for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import kvwire
from kvwire import UsageError
from kvwire.config import Config
from kvwire.security.keys import write_key_file
from kvwire_vllm.metadata import (
    TransferParams,
    answer,
    scheduled_requests,
)
from kvwire_vllm.peers import Peers
from kvwire_vllm.references import UNSIGNED, References
from packages.vllm.tests.support.fakes import Cached, New, Output
from tests.support.servers import free_port


def test_an_answer_is_what_decode_reads() -> None:
    wanted = TransferParams.read(answer("id", ("a:1", "b:2")))
    assert wanted == TransferParams(
        loads=True, computed=True, transfer_id="id", remote=("tcp://a:1", "tcp://b:2")
    )
    wanted.check()


@pytest.mark.parametrize(
    ("params", "remote"),
    [
        *((alone, ()) for alone in (None, {}, {"other": 1})),
        ({"remote": "a:1,b:2"}, ("tcp://a:1", "tcp://b:2")),
    ],
)
def test_what_is_not_said_is_usual(
    params: dict[str, Any] | None, remote: tuple[str, ...]
) -> None:
    assert TransferParams.read(params) == TransferParams(remote=remote)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"transfer_id": 7}, "Expected `str`.*transfer_id"),
        ({"transfer_id": "x" * 300}, "length <= 256.*transfer_id"),
        ({"transfer_id": "\ud800"}, "matching.*transfer_id"),
        ({"transfer_id": "a\n"}, "matching.*transfer_id"),
        ({"do_remote_decode": "\ud800"}, "surrogates not allowed"),
        ({"\ud800": 1, "do_remote_decode": True}, "surrogates not allowed"),
        ({"signature": 1}, "Expected `str`.*signature"),
        ({"do_remote_prefill": "no"}, "Expected `bool`.*do_remote_prefill"),
        ({"remote": 7}, "Expected `array`.*remote"),
        ({"remote": [7]}, "Expected `str`.*remote"),
        ({"stages": True}, "Expected `int`.*stages"),
        ({"stages": -1}, "`int` >= 1.*stages"),
        ({"stages": 2, "remote": ["a:1"]}, "stages must be"),
        ({"remote": ["a"]}, "no port"),
        ({"remote": ["a:1"] * 2000}, "length <= 1024.*remote"),
    ],
)
def test_what_cannot_be(params: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TransferParams.read(params)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (TransferParams(loads=True, remote=("a:1",)), "needs transfer_id"),
        (TransferParams(loads=True, transfer_id="x"), "remote is missing"),
    ],
)
def test_what_is_missing(wanted: TransferParams, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wanted.check()


def test_who_waits_needs_no_address() -> None:
    TransferParams(sends=True).check()


def test_a_step_visits_requests_to_which_something_happens() -> None:
    """Not those that are unknown, and not those that fill no block in it."""
    counts = dict.fromkeys(("new", "fills", "gets", "idle", "other"), 1)
    cached = Cached(
        ["fills", "gets", "idle", "other"], [None, ([7],), None, None], [7, 3, 5, 7]
    )
    output = Output(counts, [New("new", ([1],))], scheduled_cached_reqs=cached)
    known = counts.keys() - {"other"}
    due = dict.fromkeys(("new", "fills", "gets", "idle"), 8)
    visited = list(scheduled_requests(output, known, due))
    assert [(one.id, one.new, one.stop) for one in visited] == [
        ("new", True, 1),
        ("fills", False, 8),
        ("gets", False, 4),
    ]
    assert len(list(scheduled_requests(output, known))) == 4


# --- whom a request may name ----------------------------------------------------------


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


# --- connections that a worker keeps --------------------------------------------------


async def test_what_could_not_be_dialled_is_forgotten() -> None:
    """Where all of this host is trusted, requests name any address of it."""
    async with kvwire.open() as here, kvwire.open() as there:
        peers, address = Peers(), str(await there.listen("127.0.0.1:0"))
        kept = await peers.connection(here, address)
        port = free_port()
        for host in range(1, 6):
            with pytest.raises(kvwire.ConnectError):
                await peers.connection(here, f"127.0.0.{host}:{port}")
        assert await peers.connection(here, address) is kept
        assert len(peers._dials) <= 2


async def test_those_that_ask_at_once_share_a_connection() -> None:
    async with kvwire.open() as here, kvwire.open() as there:
        peers, address = Peers(), str(await there.listen("127.0.0.1:0"))
        asked = (peers.connection(here, address) for _ in range(5))
        assert len(set(await asyncio.gather(*asked))) == 1
