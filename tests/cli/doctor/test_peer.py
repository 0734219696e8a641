"""Two doctors: what one serves, and what the other finds out and notices."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import kvwire
from kvwire import Address
from kvwire.cli.bench.hosts import ConnectionLine
from kvwire.cli.bench.line import Seconds
from kvwire.cli.bench.sides import Left
from kvwire.cli.bench.work import Work
from kvwire.cli.doctor import peer
from kvwire.limits import KIB, MIB
from kvwire.types import Candidate
from tests.cli.doctor.hosts import THERE, examination, ward
from tests.support.pairs import until


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "PASS_BYTES", MIB)


async def test_a_report_reaches_whoever_runs_it() -> None:
    said: list[str] = []
    here = examination()
    async with ward() as found:
        report = await peer.examine_peer(found.prober, found.address, here, said.append)
        await until(lambda: found.heard)
    assert found.heard == [report]
    assert report.well
    assert (report.here, report.there) == (here, THERE)
    assert said == ["what both sides choose", "transport tcp"]
    choice, trial = report.trials
    assert (choice.asked, choice.rates, trial.asked) == ("", (), "tcp")
    assert (trial.error, trial.damaged) == ("", ())
    assert trial.round_trip_s is not None
    assert [(rate.verb, rate.fragment_bytes) for rate in trial.rates] == [
        (verb, size) for size in peer.FRAGMENT_BYTES for verb in ("get", "put")
    ]
    assert all(rate.bytes_per_s > 0 for rate in trial.rates)
    reasons = {c.name: c.reason for c in report.trials[0].candidates}
    assert "not among `require`" in reasons["inproc"]


async def test_a_report_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        line = ConnectionLine(connection)
        await line.receive()
        await line.send({"address": 1})
        with pytest.raises(EOFError):
            await line.receive()
        _, there = await peer.try_out(found.prober, found.address)
    assert re.search(r"ValidationError: .*`str`", capsys.readouterr().err)
    assert there == THERE
    assert found.heard == []


@pytest.mark.parametrize("verb", ["get", "put"])
async def test_damage_is_named(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    move = Left.move

    async def damaging(side: Left, work: Work, reach: Any) -> Seconds:
        seconds = await move(side, work, reach)
        pool = side.memory.pool
        if work.verb == verb and pool is not None:
            pool.memory[int(pool.rows[0]) * work.layer_bytes] ^= 1
        return seconds

    monkeypatch.setattr(Left, "move", damaging)
    monkeypatch.setattr(peer, "FRAGMENT_BYTES", (256 * KIB,))
    monkeypatch.setattr(peer, "_BUDGET_S", 1e-9)  # as on a slow wire
    async with ward() as found:
        trial, _ = await peer.try_out(found.prober, found.address, transport="tcp")
    (damage,) = trial.damaged
    digest = "[0-9a-f]{32}"
    assert re.fullmatch(
        rf"{verb} of 262144 B fragments: the received bytes differ: {digest} on the "
        rf"left, {digest} on the right",
        damage,
    )
    assert [rate.passes for rate in trial.rates] == [1, 1]


async def test_a_server_that_is_no_doctor_is_not_asked() -> None:
    async with kvwire.open() as there, kvwire.open(require=("tcp",)) as here:
        address = await there.listen("127.0.0.1:0")
        trial, _ = await peer.try_out(here, address)
        assert "does not run `kvwire doctor --listen`" in trial.error
        assert [c.name for c in trial.candidates if c.taken] == ["tcp"]
        report = await peer.examine_peer(here, address, examination(), lambda _: None)
        assert len(report.trials) == 1
        assert not report.well


async def test_a_transport_that_is_not_there_is_the_reason() -> None:
    async with kvwire.open() as here:
        address = Address("tcp", "127.0.0.1", 1)
        trial, _ = await peer.try_out(here, address, transport="carrier-pigeon")
    assert trial.asked == "carrier-pigeon"
    assert "no backend called 'carrier-pigeon'" in trial.error


async def test_a_peer_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "TRIAL_TIMEOUT_S", 0.05)
    async with kvwire.open(profile=peer.PROFILE) as there, kvwire.open() as here:
        address = await there.listen("127.0.0.1:0")
        trial, greeted = await peer.try_out(here, address)
    assert trial.error == "not done within 0.05 s"
    assert greeted is None


RATE = peer.Rate(verb="put", fragment_bytes=4096, bytes_per_s=1e9, passes=1)
GOOD = peer.Trial(candidates=(Candidate("tcp", True, ""),), rates=(RATE,))


def report(*trials: peer.Trial) -> peer.PeerReport:
    return peer.PeerReport(address="", here=examination(), there=None, trials=trials)


def test_one_good_trial_is_enough_and_damage_is_never_well() -> None:
    assert report(peer.Trial(error="no libucp"), GOOD).well
    assert not report().well
    assert not report(replace(GOOD, error="lost")).well
    assert not report(GOOD, replace(GOOD, damaged=("put",))).well
