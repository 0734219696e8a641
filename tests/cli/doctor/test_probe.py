"""What a prober finds out, and how it notices that bytes are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire import Address
from kvwire.cli.doctor import attendant, probe
from kvwire.cli.doctor.attendant import PROFILE, ProbeMemory
from kvwire.cli.doctor.probe import examine_peer, try_out
from kvwire.cli.doctor.trial import Rate
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, MIB
from tests.cli.doctor.trees import examination
from tests.cli.doctor.two import ward


async def test_a_whole_trial() -> None:
    async with ward() as found:
        trial, _ = await try_out(found.prober, found.address, (32 * KIB, MIB))
    assert trial.error == ""
    assert trial.damaged == ()
    assert trial.taken == "tcp"
    assert trial.round_trip_s is not None
    assert [(rate.verb, rate.fragment_bytes) for rate in trial.rates] == [
        *(("get", 32 * KIB), ("put", 32 * KIB)),
        *(("get", MIB), ("put", MIB)),
    ]
    assert all(rate.bytes_per_s > 0 for rate in trial.rates)


async def test_without_sizes_the_choice_alone() -> None:
    async with ward() as found:
        trial, _ = await try_out(found.prober, found.address, ())
    assert (trial.taken, trial.rates) == ("tcp", ())


async def test_on_a_slow_wire_one_pass_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_BUDGET_S", 1e-9)
    async with ward() as found:
        trial, _ = await try_out(found.prober, found.address, (MIB,))
    assert [rate.passes for rate in trial.rates] == [1, 1]


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
    monkeypatch.setattr(attendant, "ProbeMemory", kind)
    async with ward() as found:
        trial, _ = await try_out(found.prober, found.address, (MIB,))
    assert trial.damaged == damaged


async def test_bytes_beside_the_fragments_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate = probe._rate

    async def rate_beside(verb: Any, fragments: Fragments, once: Any) -> Rate:
        found = await rate(verb, fragments, once)
        if verb == "get":
            assert isinstance(fragments.owner, np.ndarray)
            fragments.owner[MIB] ^= 1
        return found

    monkeypatch.setattr(probe, "_rate", rate_beside)
    async with ward() as found:
        trial, _ = await try_out(found.prober, found.address, (MIB,))
    assert trial.damaged == ("get of 1048576 B fragments: written beside them",)


async def test_a_peer_that_lends_more_than_was_agreed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "PASS_BYTES", MIB)
    async with ward(2 * MIB) as found:
        trial, _ = await try_out(found.prober, found.address, (MIB,))
    assert "lends 2097152 bytes" in trial.error


async def test_a_server_that_is_no_doctor_is_not_asked() -> None:
    async with kvwire.open() as there, kvwire.open(require=("tcp",)) as here:
        address = await there.listen("127.0.0.1:0")
        trial, _ = await try_out(here, address, (MIB,))
        assert "no `kvwire doctor --listen`" in trial.error
        assert trial.taken == "tcp"
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
    monkeypatch.setattr(probe, "TRIAL_TIMEOUT_S", 0.05)
    async with kvwire.open(profile=PROFILE) as there, kvwire.open() as here:
        address = await there.listen("127.0.0.1:0")
        trial, greeted = await try_out(here, address, ())
    assert trial.error == "not done within 0.05 s"
    assert greeted is None
