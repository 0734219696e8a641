"""What a snapshot shows, and what is said to wait for what."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import kvwire
import kvwire_store
from kvwire import Connection, Incoming, Outcome, Outgoing
from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.driver.trace_ring import RINGS
from kvwire.endpoint.inspector import INSPECT_CLIENTS_MAX, INSPECT_LINE_BYTES_MAX
from kvwire.endpoint.io_thread import called
from kvwire.endpoint.snapshot import SILENCE_S
from kvwire.limits import SNAPSHOT_ROWS_MAX
from tests.support import inside, virtual_time
from tests.support.caches import LAYERS, Memory
from tests.support.pairs import connected
from tests.support.world import World, scenario

LIST, DEST = [1, 2, 3], [11, 12, 13]


@scenario("inproc")
async def test_what_a_transfer_waits_for_at_each_step(w: World) -> None:
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    (early,) = w.d.transfers()
    assert (early.side, early.layers, early.nbytes) == ("incoming", 0, 0)
    assert early.waits_for == "the peer 'prefill' has not published it"
    await w.until(lambda: w.p.snapshot().asked)
    assert w.p.snapshot().asked == ("t",)
    out = w.p.publish("t", w.source.cache, LIST)
    out.ready(layers=0)
    await inc.layer(0)
    (here,) = w.d.transfers()
    assert here.peers == ("prefill",)
    assert (here.layers, here.layers_marked, here.layers_landed) == (LAYERS, 1, 1)
    assert here.landed_bytes * LAYERS == here.nbytes > 0
    assert here.waits_for.endswith(f"it has marked 1 of {LAYERS} layers")
    assert "1 of 4 layers landed" in repr(inc)
    await w.until(lambda: w.p.transfers()[0].layers_landed)
    (there,) = w.p.transfers()
    assert (there.side, there.id, there.nbytes) == ("outgoing", "t", here.nbytes)
    assert (there.layers_marked, there.layers_landed) == (1, 1)
    assert there.waits_for.endswith(f"1 of {LAYERS} layers are marked")
    out.ready(layers=slice(1, LAYERS))
    await inc.layer(LAYERS - 1)
    assert w.d.transfers()[0].waits_for.endswith("the producer has not committed")
    out.finish()
    outcome = await inc
    assert (await out).nbytes == outcome.nbytes == here.nbytes
    assert not w.d.transfers() + w.p.transfers()
    assert repr(inc) == "<Incoming 't' with 'prefill', over: complete>"


@scenario("inproc")
async def test_a_producer_says_who_has_not_taken_it(w: World) -> None:
    gate = inside.services(w.p).loop.create_future()
    out = w.p.publish("t", w.source.cache, LIST)
    assert w.p.transfers()[0].waits_for == "0 of 1 consumers have pulled it"
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    out.ready(after=gate)
    out.finish()
    await w.until(lambda: w.p.transfers()[0].peers)
    assert "an event" in w.p.transfers()[0].waits_for
    gate.set_result(None)
    await w.until(lambda: not w.p.transfers() or "decode" in repr(out))
    await inc
    await out


@scenario("inproc")
async def test_a_silent_peer_is_named(w: World) -> None:
    out, inc = w.begin()
    out.ready(layers=0)
    await inc.layer(0)
    thaw = w.freeze(w.push_side)
    await virtual_time.pass_time(3.0)
    (stuck,) = w.d.transfers()
    assert "prefill is silent for" in stuck.waits_for
    (connection,) = w.d.snapshot().connections
    assert connection.silent_s >= SILENCE_S
    assert f"last frame {connection.silent_s:.1f} s ago" in repr(w.pull_side)
    thaw()
    out.abort()
    inc.abort()


@scenario("inproc")
async def test_a_snapshot_is_json_and_its_rows_are_bounded(w: World) -> None:
    cache = w.source.cache
    outs = [w.p.publish(i, cache, LIST) for i in range(SNAPSHOT_ROWS_MAX)]
    outs.append(w.p.publish(b"\xff", cache, LIST))
    request = w.pull_side.send(7, bytes(10))
    await w.until(lambda: w.push_side.unreceived)
    taken = w.p.snapshot()
    assert taken.open_transfers == len(taken.transfers) + 1 == len(outs)
    (connection,) = taken.connections
    assert (connection.peer, connection.unreceived) == ("decode", 1)
    assert (connection.transport, connection.state) == ("inproc", "open")
    text = msgspec.json.encode(taken)
    assert msgspec.json.decode(text, type=kvwire.Snapshot) == taken
    assert msgspec.to_builtins(taken).keys() == dataclasses.asdict(taken).keys()
    assert w.p.transfers()[-1].id == "ff"
    for out in outs:
        out.abort()
    await request


@scenario("inproc")
async def test_requests_say_what_they_wait_for(w: World) -> None:
    receive = w.pull_side.recv(7)
    assert "recv of tag 7, with 'prefill', waits for a message" in repr(receive)
    large = w.pull_side.send(8, bytes(2**20))
    assert "send of tag 8, with 'prefill', waits for the peer" in repr(large)
    region = w.d.register(bytearray(8), "write")
    put = w.push_side.put(bytes(8), region.grant(w.pull_side))
    assert "put with 'decode', 8 of 8 bytes moved" in repr(put)
    await put
    assert repr(put) == "<Request done>"
    receive.cancel()
    assert repr(receive).startswith("<Request failed: ")
    deferred = w.d.peer(str(w.address)).recv(9)
    assert "waits for a connection to peer" in repr(deferred)
    large.cancel()
    deferred.cancel()
    await region.close()


async def test_stores_of_the_loop_are_in_it() -> None:
    cache = Memory().cache
    async with (
        kvwire.open(name="a") as communicator,
        kvwire_store.BlockStore.open(["memory:1MiB"]) as store,
    ):
        put = store.put([b"one", b"two"], cache, [0, 1])
        named = {s.name: s for s in communicator.snapshot().parts}
        (call,) = named[store.name].calls
        assert call.text == "put of 2 blocks"
        await put
        named = {s.name: s for s in communicator.snapshot().parts}
        shown = named[store.name]
        assert (shown.calls, shown.trouble) == ((), {})
        assert shown.summary == "0 blocks pinned, 0 found, 0 not found"
        assert shown.counters["stored_blocks"] == 2


def test_an_engine_takes_one_too() -> None:
    with kvwire.Engine(name="engine") as engine:
        assert engine.run(called(engine.communicator.snapshot)).name == "engine"


# --- A process that lets its user look in: who may, what is bounded, and how it ends


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


async def ask(path: Path, line: bytes) -> bytes:
    """The answer; nothing if the process hangs up instead."""
    reader, writer = await asyncio.open_unix_connection(path, limit=2**20)
    answer = b""
    with suppress(ConnectionError):
        writer.write(line)
        answer = await reader.readline()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return answer


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.lstat().st_mode)


def found(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


async def test_a_line_is_answered_and_a_close_leaves_nothing(folder: Path) -> None:
    async with kvwire.open(name="a", inspect=str(folder)) as communicator:
        assert mode(folder) == 0o700
        (path,) = found(folder)
        assert path.name.startswith(
            f"{os.getpid()}-{communicator.incarnation.hex()[:8]}"
        )
        shown = msgspec.json.decode(
            await ask(path, b"snapshot\n"), type=kvwire.Snapshot
        )
        assert (shown.name, shown.pid) == ("a", os.getpid())
        assert b"events" in await ask(path, b"trace\n")
        assert b"error" in await ask(path, b"abort\n")
        # More than a line may have ends that client only.
        assert await ask(path, b"x" * (INSPECT_LINE_BYTES_MAX * 4)) == b""
        assert b"pid" in await ask(path, b"snapshot\n")
    assert not found(folder)
    assert asyncio.get_running_loop() not in RINGS


@pytest.mark.parametrize("turns", range(4))
async def test_an_opening_that_is_cancelled_leaves_nothing(
    folder: Path, turns: int
) -> None:
    async def opened() -> None:
        await (await kvwire.open(name="a", inspect=str(folder))).close()

    opening = asyncio.create_task(opened())
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert not found(folder)


async def test_those_who_look_are_bounded_and_do_not_hold_up_a_close(
    folder: Path,
) -> None:
    async with kvwire.open(inspect=str(folder)):
        (path,) = found(folder)
        held = [
            await asyncio.open_unix_connection(path) for _ in range(INSPECT_CLIENTS_MAX)
        ]
        for reader, writer in held:
            writer.write(b"snapshot\n")
            assert await reader.readline()
        assert await ask(path, b"snapshot\n") == b""
    for reader, writer in held:
        assert await reader.read() == b""
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    folder, link, file = (tmp_path / name for name in ("run", "link", "file"))
    folder.mkdir()
    folder.chmod(0o755)
    link.symlink_to(folder)
    file.touch()
    refused = {folder: "chmod 700", file / "run": "inspect="}
    for place, said in {**refused, link: "a symbolic link"}.items():
        with pytest.raises(kvwire.UsageError, match=said):
            kvwire.Engine(inspect=str(place))


@pytest.mark.parametrize("length", [100, 200])
def test_a_folder_too_long_for_a_socket_is_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Also a short name, which counts from the root; and nothing is made there."""
    monkeypatch.chdir(tmp_path)
    name = "x" * (length - len(str(tmp_path)))
    with pytest.raises(kvwire.UsageError, match=r"and systems allow 103; .* shorter"):
        kvwire.Engine(inspect=name)
    assert not Path(name).exists()


# --- who is told of transfers: of each begin and each end, once, and of nothing else


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
