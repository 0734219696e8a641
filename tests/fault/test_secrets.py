"""Goal S12: neither keys nor payload appear in logs, reprs, exceptions or answers.

A key and payload that occur nowhere else are used in every way, also the wrong ones,
with all loggers at DEBUG. Whatever was written down is searched for them, as they are,
in hexadecimal and in base64.
"""

from __future__ import annotations

import base64
import gc
import logging
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import kvwire
from kvwire import Connection, Grant, KVWireError, Request
from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.proto.auth import Keys
from kvwire.proto.handshake import Agreement, Identity
from kvwire.proto.regions import GrantRow
from kvwire.security.keys import read_key_file, write_key_file
from kvwire.wire.handshake_messages import key_id
from tests.fault.stranger import TERMS, dial
from tests.support import inside
from tests.support.caches import Memory
from tests.support.core_pair.handshakes import identity
from tests.support.pairs import Pair, connected

CANARY = b"canary payload: nobody writes this down"
PAYLOADS = (CANARY, CANARY * 3000)
# Of a long secret any part that is this long gives it away.
PART_BYTES = 12


def spellings(secret: bytes) -> set[str]:
    """Ways in which the secret, or enough of it, could appear in a text."""
    found = set()
    for start in range(len(secret) - PART_BYTES + 1):
        part = secret[start : start + PART_BYTES]
        found |= {part.hex(), repr(part)[2:-1], repr(list(part))[1:-1]}
        found.add(base64.b64encode(part).decode().rstrip("=")[:-1])
    return found


def expect_absent(secrets: Iterable[bytes], text: str) -> None:
    lowered = text.lower()
    for secret in secrets:
        for spelling in spellings(secret):
            assert spelling.lower() not in lowered, f"{spelling!r} was written down"


def test_the_search_finds_what_it_looks_for() -> None:
    for text in (
        f"key={CANARY.hex()}",
        f"got {CANARY!r}",
        f"b64 {base64.b64encode(CANARY[3:]).decode()}",
        f"list {list(CANARY)}",
        f"upper {CANARY.hex().upper()}",
    ):
        with pytest.raises(AssertionError, match="written down"):
            expect_absent([CANARY], text)
    expect_absent([CANARY], "canary, payload, nobody")


class Notes:
    """Everything that was said, shown or raised."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def show(self, *things: Any) -> None:
        for thing in things:
            self._texts += [repr(thing), str(thing)]

    async def expect_error(self, request: Request[Any]) -> None:
        with pytest.raises(KVWireError) as caught:
            await request
        self._texts += traceback.format_exception(caught.value)

    @property
    def text(self) -> str:
        return "\n".join(self._texts)


def keys_alive() -> list[bytes]:
    """Every key that was derived and is still in use, and what is derived of them."""
    found = []
    for item in gc.get_objects():
        if isinstance(item, Keys):
            found += [item.accept, item.confirm, item.lane]
            found += [*item.seal.values(), *item.grant.values()]
        elif isinstance(item, Agreement):
            # Its beginning names the connection, in a grant too.
            found.append(item.digest[16:])
    return found


@pytest.mark.parametrize("scheme", ["tcp", "inproc"])
async def test_nothing_secret_is_written_down(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    write_key_file(tmp_path / "key")
    path = str(tmp_path / "key")
    notes = Notes()
    async with connected(scheme, trust="psk", psk_file=path) as pair:
        grant = pair.far.register(bytearray(8)).grant(pair.right)
        notes.show(grant, *(i for i in gc.get_objects() if isinstance(i, GrantRow)))
        await use(pair, notes)
        await misuse(pair.left, pair.right, notes)
        holders = (Connection, ConnectionDriver, Identity, Agreement, Keys)
        notes.show(*(i for i in gc.get_objects() if isinstance(i, holders)))
        notes.show(pair, pair.near.config, inside.links(pair.near).identity)
        secrets = [CANARY, read_key_file(path), grant.token, *keys_alive()]
        assert len(secrets) > 6
    notes.show(*(record.__dict__ for record in caplog.records))
    expect_absent(secrets, notes.text + caplog.text)
    assert key_id(secrets[1]).hex() not in caplog.text


async def use(pair: Pair, notes: Notes) -> None:
    left, right = pair.left, pair.right
    for payload in PAYLOADS:
        request = left.send(1, payload)
        received = right.recv(1)
        notes.show(request, received)
        assert await received == payload
        region = pair.far.register(bytearray(payload), "readwrite")
        grant = region.grant(right)
        notes.show(region, grant, Grant.from_bytes(grant.to_bytes()))
        assert grant.token.hex() not in repr(grant)
        await left.put(payload, grant)
        await left.get(grant, bytearray(len(payload)))
        await region.close()
        await notes.expect_error(left.put(payload, grant))


async def misuse(left: Connection, right: Connection, notes: Notes) -> None:
    """Errors of every kind, with payload in every buffer that they are about."""
    small = bytearray(CANARY[:8])
    pending = left.send(2, PAYLOADS[1])
    await notes.expect_error(right.recv(2, small, deadline=5))
    pending.cancel()
    await notes.expect_error(pending)
    await notes.expect_error(right.recv(3, bytearray(CANARY), deadline=0.01))
    for tag, wrong in ((-1, CANARY), (1, CANARY.decode())):
        with pytest.raises(KVWireError) as caught:
            left.send(tag, wrong)  # type: ignore[arg-type]
        notes.show(caught.value)
    waiting = right.recv(4, bytearray(CANARY))
    left.abort("aborted with payload around")
    await notes.expect_error(waiting)
    notes.show(left, right, waiting)


async def test_a_wrong_key_is_not_written_down_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    paths = [tmp_path / "one", tmp_path / "other"]
    for path in paths:
        write_key_file(path)
    async with (
        kvwire.open(trust="psk", psk_file=str(paths[0])) as one,
        kvwire.open(trust="psk", psk_file=str(paths[1])) as other,
    ):
        with pytest.raises(KVWireError) as caught:
            await one.connect(await other.listen("127.0.0.1:0"))
    said = "".join(traceback.format_exception(caught.value))
    expect_absent([read_key_file(str(path)) for path in paths], said + caplog.text)


async def test_a_peer_cannot_write_lines_of_its_own_into_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Names are shown as literals, and not at any length."""
    caplog.set_level(logging.DEBUG)
    name = "mallory\n2026-01-01 ERROR forged line\x1b[31m" + "x" * 80
    async with connected() as pair:
        who = identity(name, parameters=TERMS)
        async with dial(pair.address, who) as stranger:
            there = await pair.far.accept()
            await stranger.say(bytes(32))
            await there.wait_closed()
        assert "forged line" in repr(there)
        assert "\n" not in repr(there)
    for record in caplog.records:
        if record.name.startswith("kvwire"):
            assert "\n" not in record.getMessage()
            assert "\x1b" not in record.getMessage()


async def test_what_a_program_passes_on_forges_no_line_either(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reason of an abort may have a client's words in it."""
    caplog.set_level(logging.DEBUG)
    why = "client\n2026-01-01 ERROR forged line\x1b[2J left"
    async with connected() as pair:
        out = pair.far.publish("x", Memory().cache, [0])
        inc = pair.left.pull("x", Memory().cache, [0])
        out.abort(why)
        reasons = [*(await out).missing.reasons, *(await inc).missing.reasons]
        receiving = pair.left.recv(1)
        pair.left.abort(why)
        with pytest.raises(kvwire.ConnectionLost, match="forged line") as lost:
            await receiving
    lines = [one.getMessage() for one in caplog.records if one.name[:6] == "kvwire"]
    for text in (*reasons, str(lost.value), *lines):
        assert text.isprintable()
    assert any("forged line" in line for line in lines)
