"""Who is told of transfers: of each begin and each end, once, and of nothing else."""

from __future__ import annotations

import pytest

import kvwire
from kvwire import Connection, Incoming, Outcome, Outgoing
from kvwire.driver.connection_driver import ConnectionDriver
from tests.support.caches import Memory
from tests.support.pairs import connected


class Notes:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def begun(self, transfer: Incoming | Outgoing) -> None:
        self.lines.append(("begun", transfer.id))

    def ended(
        self,
        transfer: Incoming | Outgoing,
        outcome: Outcome,
        connections: tuple[Connection, ...],
    ) -> None:
        names = [one.peer.name for one in connections]
        self.lines.append(("ended", transfer.id, outcome.state, names))


class Broken(Notes):
    """One that raises, at first and at last."""

    def begun(self, transfer: Incoming | Outgoing) -> None:
        raise RuntimeError("at the beginning")

    def ended(
        self,
        transfer: Incoming | Outgoing,
        outcome: Outcome,
        connections: tuple[Connection, ...],
    ) -> None:
        raise RuntimeError("at the end")


async def test_a_begin_and_an_end() -> None:
    notes = Notes()
    async with connected("inproc") as pair:
        pair.near.watchers.add(notes)
        inc = pair.left.pull("x", Memory().cache, [0])
        assert notes.lines == [("begun", "x")]
        out = pair.far.publish("x", Memory().cache, [0])
        out.ready()
        out.finish()
        await inc
        await inc.drained()
    assert notes.lines == [("begun", "x"), ("ended", "x", "complete", ["far"])]


async def test_one_that_asking_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a link does that turns out to be lost when it is used."""
    notes, ask = Notes(), Incoming._ask

    def ask_and_end(self: Incoming, connection: ConnectionDriver) -> None:
        ask(self, connection)
        self.abort()

    async with connected("inproc") as pair:
        pair.near.watchers.add(notes)
        monkeypatch.setattr(Incoming, "_ask", ask_and_end)
        assert not (await pair.left.pull("x", Memory().cache, [0])).complete
    assert notes.lines == [("begun", "x"), ("ended", "x", "failed", ["far"])]


async def test_what_was_never_taken_on_is_not_told() -> None:
    notes = Notes()
    async with connected("inproc") as pair:
        pair.far.watchers.add(notes)
        out = pair.far.publish("x", Memory().cache, [0])
        with pytest.raises(kvwire.UsageError, match="published already"):
            pair.far.publish("x", Memory().cache, [1])
        pair.left.abort()
        await pair.right.wait_closed()
        out.abort()
    assert notes.lines == [("begun", "x"), ("ended", "x", "failed", [])]


async def test_a_pull_on_a_lost_connection_begins_and_ends() -> None:
    notes = Notes()
    async with connected("inproc") as pair:
        pair.far.watchers.add(notes)
        pair.left.abort()
        await pair.right.wait_closed()
        outcome = await pair.right.pull("y", Memory().cache, [2])
        assert not outcome.complete
    assert notes.lines == [("begun", "y"), ("ended", "y", "failed", [])]


async def test_one_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    async with connected("inproc") as pair:
        for watcher in (Broken(), notes):
            pair.far.watchers.add(watcher)
        out = pair.far.publish("x", Memory().cache, [0])
        out.abort()
        assert not (await out).complete
        await out.drained()
    assert [line[0] for line in notes.lines] == ["begun", "ended"]
    assert "at the beginning" in caplog.text
    assert "at the end" in caplog.text


async def test_one_that_was_removed_is_told_nothing() -> None:
    notes = Notes()
    async with connected("inproc") as pair:
        pair.far.watchers.add(notes)
        pair.far.watchers.remove(notes)
        pair.far.watchers.remove(notes)
        pair.far.publish("x", Memory().cache, [0]).abort()
    assert not notes.lines
