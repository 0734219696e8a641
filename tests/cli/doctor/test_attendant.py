"""What an attendant does for whoever asks, and what it refuses."""

from __future__ import annotations

import pytest

from kvwire import Grant, KVWireError
from kvwire.cli.doctor import attendant, words
from kvwire.cli.doctor.arena import Arena
from kvwire.cli.doctor.probe import examine_peer
from kvwire.cli.doctor.trial import Report
from kvwire.cli.doctor.words import (
    ASK_TAG,
    ECHO_TAG,
    Digest,
    Digested,
    Done,
    Echo,
    Finish,
    Lend,
    Lent,
    ask,
    heard,
    say,
)
from kvwire.limits import KIB, MIB
from tests.cli.doctor.trees import examination
from tests.cli.doctor.two import THERE, ward


async def test_it_says_what_its_host_is_like() -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        assert await examine_peer(connection) == THERE


async def test_echoes_come_back() -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        await say(connection, Echo(2))
        for text in (b"a" * 64, b"b" * 64):
            await connection.send(ECHO_TAG, text)
            assert await connection.recv(ECHO_TAG) == text
        assert await heard(connection, Done) == Done()


async def test_it_lends_memory_that_it_chose_and_filled() -> None:
    async with ward(2 * MIB) as found:
        connection = await found.prober.connect(found.address)
        lent = await ask(connection, Lend(32 * KIB, 5), Lent)
        here = Arena(2 * MIB, 4 * KIB)
        await connection.get(Grant.from_bytes(lent.grant), into=here.fragments)
        there = await ask(connection, Digest(), Digested)
        assert there == Digested(here.digest(), gaps_untouched=True)


async def test_what_is_lent_again_is_other_memory() -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        first = await ask(connection, Lend(4 * KIB, 1), Lent)
        await ask(connection, Lend(4 * KIB, 1), Lent)
        with pytest.raises(KVWireError, match="grant"):
            await connection.get(Grant.from_bytes(first.grant), into=bytearray(MIB))


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (Echo(words.ECHOES_MAX + 1), "at most 1000"),
        (Echo(-1), "at most 1000"),
        (Lend(5000, 1), "one of"),
        (Lend(2**40, 1), "one of"),
        (Lend(4 * KIB, -1), "64 bits"),
        (Digest(), "nothing is lent"),
    ],
)
async def test_what_it_refuses(question: words.Ask, said: str) -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        with pytest.raises(KVWireError, match=said):
            await ask(connection, question, Done)
        assert await examine_peer(connection) == THERE


async def test_an_answer_of_another_kind_is_an_error() -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        with pytest.raises(KVWireError, match="Done"):
            await ask(connection, Echo(0), Lent)


async def test_a_report_reaches_whoever_runs_it() -> None:
    report = Report(address="there", here=examination(), there=THERE, trials=())
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        await ask(connection, Finish(report), Done)
        await connection.close()
        await examine_peer(await found.prober.connect(found.address))
        assert found.heard == [report]


async def test_nonsense_ends_the_visit_and_not_the_attendant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        await connection.send(ASK_TAG, b'{"type": "no such question"}')
        await connection.wait_closed()
        again = await found.prober.connect(found.address)
        assert await examine_peer(again) == THERE
    assert "another version" in caplog.text


async def test_who_asks_nothing_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendant, "PATIENCE_S", 0)
    async with ward() as found:
        connection = await found.prober.connect(found.address)
        await connection.wait_closed()
        assert found.heard == [None]
