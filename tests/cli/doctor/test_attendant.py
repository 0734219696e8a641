"""What an attendant does for whoever asks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvwire import Connection, Grant
from kvwire.cli.doctor import attendant
from kvwire.cli.doctor.attendant import (
    ANSWER_TAG,
    ASK_TAG,
    DIGEST,
    ECHO,
    FRAGMENT_BYTES,
    GREETING_TAG,
    SEED,
    Greeting,
    ProbeMemory,
)
from kvwire.cli.doctor.probe import examine_peer
from kvwire.limits import KIB, MIB
from tests.cli.doctor.trees import examination
from tests.cli.doctor.two import THERE, ward


async def greeted(connection: Connection) -> Greeting:
    return msgspec.json.decode(await connection.recv(GREETING_TAG), type=Greeting)


async def test_it_says_what_its_host_is_like() -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        assert (await greeted(connection)).examination == THERE


async def test_echoes_come_back() -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        for text in (ECHO + b"a" * 63, ECHO):
            await connection.send(ASK_TAG, text)
            assert await connection.recv(ANSWER_TAG) == text


async def test_it_lends_memory_that_it_filled_at_every_size() -> None:
    async with ward(2 * MIB) as found:
        connection = await found.prober.connect(found.address)
        grants = (await greeted(connection)).grants
        there = ProbeMemory(2 * MIB, SEED)
        for size, grant in zip(FRAGMENT_BYTES, grants, strict=True):
            here = ProbeMemory(2 * MIB, 7)
            await connection.get(Grant.from_bytes(grant), into=here.fragments(size))
            assert np.array_equal(here.slots(size)[:, 0], there.slots(size)[:, 0])
        await connection.send(ASK_TAG, DIGEST)
        assert await connection.recv(ANSWER_TAG) == there.digest()


def test_fragments_lie_apart_and_make_up_the_total() -> None:
    fragments = ProbeMemory(64, 1).fragments(16)
    assert fragments.nbytes == 64
    assert np.diff(fragments.addresses.astype(np.int64)).tolist() == [32] * 3


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
    assert [trial.asked for trial in report.trials] == ["", "tcp"]
    assert {rate.fragment_bytes for rate in report.trials[1].rates} == set(
        FRAGMENT_BYTES
    )
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
    monkeypatch.setattr(attendant, "PATIENCE_S", 0)
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        await connection.wait_closed()
        assert found.heard == [None]


def test_sizes_divide_what_is_lent() -> None:
    assert all(MIB % size == 0 for size in FRAGMENT_BYTES)
    assert FRAGMENT_BYTES[0] == 4 * KIB
