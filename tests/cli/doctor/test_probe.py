"""What a prober finds out, and how it notices that bytes are wrong."""

from __future__ import annotations

import asyncio

import pytest

import kvwire
from kvwire import Address
from kvwire.cli.doctor import attendant, probe
from kvwire.cli.doctor.arena import Arena
from kvwire.cli.doctor.probe import try_out
from kvwire.limits import KIB, MIB
from tests.cli.doctor.two import ward


async def test_a_whole_trial() -> None:
    async with ward() as found:
        trial = await try_out(found.prober, found.address, (32 * KIB, MIB))
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
        trial = await try_out(found.prober, found.address, ())
    assert (trial.taken, trial.rates) == ("tcp", ())


async def test_on_a_slow_wire_one_pass_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_BUDGET_S", 1e-9)
    async with ward() as found:
        trial = await try_out(found.prober, found.address, (MIB,))
    assert [rate.passes for rate in trial.rates] == [1, 1]


class _OtherBytes(Arena):
    def fill(self, seed: int) -> None:
        super().fill(seed + 1)


class _OtherDigest(Arena):
    def digest(self) -> bytes:
        return b"other"

    @property
    def gaps_untouched(self) -> bool:
        return False


async def test_bytes_that_arrive_damaged_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attendant, "Arena", _OtherBytes)
    async with ward() as found:
        trial = await try_out(found.prober, found.address, (MIB,))
    assert trial.damaged == ("get of 1048576 B fragments: other bytes than were sent",)


async def test_damage_at_the_other_side_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attendant, "Arena", _OtherDigest)
    async with ward() as found:
        trial = await try_out(found.prober, found.address, (MIB,))
    assert trial.damaged == (
        "put of 1048576 B fragments: other bytes than were sent",
        "put of 1048576 B fragments: written beside them",
    )


async def test_bytes_beside_the_fragments_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here, so that only this side's gaps count."""
    monkeypatch.setattr(Arena, "gaps_untouched", property(lambda _: False))
    async with ward() as found:
        trial = await try_out(found.prober, found.address, (MIB,))
    assert "get of 1048576 B fragments: written beside them" in trial.damaged


async def test_a_peer_that_lends_more_than_was_agreed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "PASS_BYTES", MIB)
    async with ward(2 * MIB) as found:
        trial = await try_out(found.prober, found.address, (MIB,))
    assert "lends 2097152 bytes" in trial.error


async def test_a_server_that_is_no_doctor_is_not_asked() -> None:
    async with kvwire.open() as there, kvwire.open(require=("tcp",)) as here:
        address = await there.listen("127.0.0.1:0")
        trial = await try_out(here, address, (MIB,))
        assert "no `kvwire doctor --listen`" in trial.error
        assert trial.taken == "tcp"


async def test_nobody_there() -> None:
    async with kvwire.open() as here, kvwire.open() as there:
        address = await there.listen("127.0.0.1:0")
        await there.close()
        trial = await try_out(here, address, (MIB,))
    assert trial.error.startswith("ConnectError")


async def test_a_transport_that_is_not_there_is_the_reason() -> None:
    async with kvwire.open() as here:
        address = Address("tcp", "127.0.0.1", 1)
        trial = await try_out(here, address, (MIB,), transport="carrier-pigeon")
    assert trial.asked == "carrier-pigeon"
    assert "no backend called 'carrier-pigeon'" in trial.error


async def test_a_peer_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(probe, "TRIAL_TIMEOUT_S", 0.05)
    async with ward() as found:
        trial = await try_out(found.prober, found.address, (), before=silent)
    assert trial.error == "not done within 0.05 s"
