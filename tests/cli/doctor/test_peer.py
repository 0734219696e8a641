"""Two doctors: what one serves, and what the other finds out and notices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

import kvwire
from kvwire import Address, Connection, Grant
from kvwire.cli.doctor import peer
from kvwire.cli.doctor.peer import (
    ANSWER_TAG,
    ASK_TAG,
    DIGEST,
    ECHO,
    FRAGMENT_BYTES,
    GREETING_TAG,
    PROFILE,
    SEED,
    Greeting,
    PeerReport,
    ProbeMemory,
    Rate,
    Trial,
    examine_peer,
    try_out,
)
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.types import Candidate
from tests.cli.doctor.hosts import THERE, examination, ward


async def greeted(connection: Connection) -> Greeting:
    return msgspec.json.decode(await connection.recv(GREETING_TAG), type=Greeting)


async def test_it_lends_memory_that_it_filled_at_every_size() -> None:
    async with ward(2 * MIB) as found:
        connection = await found.prober.connect(found.address)
        greeting = await greeted(connection)
        assert greeting.examination == THERE
        grants = greeting.grants
        there = ProbeMemory(2 * MIB, SEED)
        for size, grant in zip(FRAGMENT_BYTES, grants, strict=True):
            here = ProbeMemory(2 * MIB, 7)
            await connection.get(Grant.from_bytes(grant), into=here.fragments(size))
            assert np.array_equal(here.slots(size)[:, 0], there.slots(size)[:, 0])
        for asked, answer in ((DIGEST, there.digest()), (ECHO + b"a", ECHO + b"a")):
            await connection.send(ASK_TAG, asked)
            assert await connection.recv(ANSWER_TAG) == answer


async def test_a_report_reaches_whoever_runs_it() -> None:
    said: list[str] = []
    here = examination()
    async with ward() as found:
        report = await examine_peer(found.prober, found.address, here, said.append)
        await greeted(await found.prober.connect(found.address))
        assert found.heard == [None, None, report]
    assert report.well
    assert (report.here, report.there) == (here, THERE)
    assert said == ["what both sides choose", "transport tcp"]
    choice, trial = report.trials
    assert (choice.asked, choice.rates, trial.asked) == ("", (), "tcp")
    assert (trial.error, trial.damaged) == ("", ())
    assert trial.round_trip_s is not None
    assert [(rate.verb, rate.fragment_bytes) for rate in trial.rates] == [
        (verb, size) for size in FRAGMENT_BYTES for verb in ("get", "put")
    ]
    assert all(rate.bytes_per_s > 0 for rate in trial.rates)
    reasons = {c.name: c.reason for c in report.trials[0].candidates}
    assert "not among `require`" in reasons["inproc"]


async def test_nonsense_ends_the_visit_and_not_the_attendant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        await connection.send(ASK_TAG, b'r{"address": 1}')
        await connection.wait_closed()
        again = await found.prober.connect(found.address)
        assert (await greeted(again)).examination == THERE
    assert "another version" in caplog.text


async def test_who_asks_nothing_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "PATIENCE_S", 0)
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        await connection.wait_closed()
        assert found.heard == [None]


class _OtherBytes(ProbeMemory):
    def __init__(self, pass_bytes: int, seed: int) -> None:
        super().__init__(pass_bytes, seed)
        self.bytes[0] ^= 1


class _OtherBytesBetween(ProbeMemory):
    def __init__(self, pass_bytes: int, seed: int) -> None:
        super().__init__(pass_bytes, seed)
        self.bytes[MIB] ^= 1


GET_DAMAGED = "get of 1048576 B fragments: other bytes than were sent"
PUT_DAMAGED = "put of 1048576 B fragments: other bytes than were sent, or beside them"


@pytest.mark.parametrize(
    ("kind", "damaged"),
    [(_OtherBytes, (GET_DAMAGED,)), (_OtherBytesBetween, (PUT_DAMAGED,))],
)
async def test_damage_is_named(
    kind: type[ProbeMemory], damaged: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put repairs what was wrong in a fragment, and not what is between them."""
    monkeypatch.setattr(peer, "_BUDGET_S", 1e-9)  # as on a slow wire
    async with ward(kind=kind) as found:
        trial, _ = await try_out(found.prober, found.address, (MIB,))
    assert trial.damaged == damaged
    assert [rate.passes for rate in trial.rates] == [1, 1]


async def test_bytes_beside_the_fragments_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate = peer._rate

    async def rate_beside(verb: Any, fragments: Fragments, once: Any) -> Rate:
        found = await rate(verb, fragments, once)
        if verb == "get":
            assert isinstance(fragments.owner, np.ndarray)
            fragments.owner[MIB] ^= 1
        return found

    monkeypatch.setattr(peer, "_rate", rate_beside)
    async with ward() as found:
        trial, _ = await try_out(found.prober, found.address, (MIB,))
    assert trial.damaged == ("get of 1048576 B fragments: written beside them",)


async def test_a_peer_that_lends_more_than_was_agreed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "PASS_BYTES", MIB)
    async with ward(2 * MIB) as found:
        trial, _ = await try_out(found.prober, found.address, (MIB,))
    assert "lends 2097152 bytes" in trial.error


async def test_a_server_that_is_no_doctor_is_not_asked() -> None:
    async with kvwire.open() as there, kvwire.open(require=("tcp",)) as here:
        address = await there.listen("127.0.0.1:0")
        trial, _ = await try_out(here, address, (MIB,))
        assert "no `kvwire doctor --listen`" in trial.error
        assert [c.name for c in trial.candidates if c.taken] == ["tcp"]
        report = await examine_peer(here, address, examination(), lambda _: None)
        assert len(report.trials) == 1
        assert not report.well


async def test_nobody_there() -> None:
    async with kvwire.open() as here, kvwire.open() as there:
        address = await there.listen("127.0.0.1:0")
        await there.close()
        trial, _ = await try_out(here, address, (MIB,))
    assert trial.error.startswith("ConnectError")


async def test_a_transport_that_is_not_there_is_the_reason() -> None:
    async with kvwire.open() as here:
        address = Address("tcp", "127.0.0.1", 1)
        trial, _ = await try_out(here, address, (MIB,), transport="carrier-pigeon")
    assert trial.asked == "carrier-pigeon"
    assert "no backend called 'carrier-pigeon'" in trial.error


async def test_a_peer_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "TRIAL_TIMEOUT_S", 0.05)
    async with kvwire.open(profile=PROFILE) as there, kvwire.open() as here:
        address = await there.listen("127.0.0.1:0")
        trial, greeted = await try_out(here, address, ())
    assert trial.error == "not done within 0.05 s"
    assert greeted is None


RATE = Rate(verb="put", fragment_bytes=4096, bytes_per_s=1e9, passes=1)
GOOD = Trial(candidates=(Candidate("tcp", True, ""),), rates=(RATE,))


def report(*trials: Trial) -> PeerReport:
    return PeerReport(address="", here=examination(), there=None, trials=trials)


def test_one_good_trial_is_enough_and_damage_is_never_well() -> None:
    assert report(Trial(error="no libucp"), GOOD).well
    assert not report().well
    assert not report(replace(GOOD, error="lost")).well
    assert not report(GOOD, replace(GOOD, damaged=("put",))).well
