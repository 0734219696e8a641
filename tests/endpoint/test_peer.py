"""A peer is dialled when it is used, again when it has ended, and by what it does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire.directory import Record
from kvwire.directory.file import FileDirectory
from kvwire.endpoint.communicator import PEERS_MAX
from kvwire.security.keys import write_key_file
from tests.directory.records import record
from tests.support import inside
from tests.support.lanes import BESIDE, HangingLane, impatient, reasons, use
from tests.support.logs import warned
from tests.support.pairs import communicators, turns, until
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S

SPEC = kvwire.KVSpec(
    layers=2, kv_heads=1, head_dim=4, block_tokens=2, dtype="float32", fingerprint="m"
)


def cache(value: float = 0.0) -> kvwire.PagedCache:
    return kvwire.PagedCache(SPEC, tensors(value))


def tensors(value: float = 0.0) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    return [np.full((8, 2, 2, 1, 4), value, np.float32) for _ in range(SPEC.layers)]


@asynccontextmanager
async def fleet(
    folder: Path, names: str, **config: Any
) -> AsyncIterator[tuple[kvwire.Communicator, list[kvwire.Communicator]]]:
    """One that looks for peers, and members of role "decode" that it may find."""
    options: dict[str, Any] = {
        "directory": f"file:{folder}?interval_s=0.02",
        "handshake_timeout_s": 5.0,
        **config,
    }
    async with kvwire.open(**options, name="seeker") as seeker:
        members = [await kvwire.open(**options, name=name) for name in names]
        try:
            for member in members:
                await member.listen("127.0.0.1:0")
                member.announce(role="decode", labels={"zone": member.name})
            yield seeker, members
        finally:
            for member in members:
                await member.close()


def loads(folder: Path) -> list[float]:
    """What the records in a folder say."""
    found = (Record.decode(file.read_bytes()) for file in folder.glob("*.json"))
    return sorted(one.load for one in found)


async def name_of(peer: kvwire.Peer) -> str:
    return (await peer.connect()).peer.name


# --- by address -----------------------------------------------------------------------


async def test_verbs_dial_the_peer_when_it_is_first_used() -> None:
    async with communicators() as (near, far):
        address = await far.listen("127.0.0.1:0")
        peer = near.peer(str(address))
        assert "not connected" in repr(peer)
        sent, second = peer.send(1, b"first"), peer.send(1, b"second")
        back = peer.recv(2)
        inbound = await far.accept()
        assert await inbound.recv(1) == b"first"
        assert await inbound.recv(1) == b"second"
        await inbound.send(2, b"back")
        assert await back == b"back"
        assert (await sent, await second) == (5, 6)
        assert peer.connection is await peer.connect()
        # Connected, verbs are those of the connection.
        assert await peer.send(1, b"third") == 5
        assert await inbound.recv(1) == b"third"
        assert len(near.live_connections) == 1


async def test_one_text_is_one_peer() -> None:
    async with communicators() as (near, far):
        address = str(await far.listen("127.0.0.1:0"))
        one, another = near.peer(address), near.peer(address)
        assert await one.connect() is await another.connect()
        await one.close()
        assert near.peer(address).connection is None


async def test_grants_are_of_one_connection() -> None:
    async with communicators() as (near, far):
        peer = near.peer(str(await far.listen("127.0.0.1:0")))
        first = peer.send(1, b"")
        inbound = await far.accept()
        await first
        memory, into = bytearray(b"memory"), bytearray(6)
        region = far.register(memory, "readwrite")
        grant = region.grant(inbound)
        assert await peer.get(grant, into) == 6
        assert into == b"memory"
        assert await peer.put(b"change", grant) == 6
        assert memory == b"change"
        await inbound.close()
        await until(lambda: peer.connection is None)
        with pytest.raises(kvwire.UsageError, match="grant was made for connection"):
            await peer.get(grant, into)
        await region.close()


async def test_a_peer_is_dialled_again_when_its_connection_has_ended() -> None:
    async with communicators() as (near, far):
        peer = near.peer(str(await far.listen("127.0.0.1:0")))
        first = await peer.connect()
        first.abort()
        await first.wait_closed()
        second = await peer.connect()
        assert second is not first
        await peer.send(1, b"x")


async def test_a_peer_that_comes_late_is_found() -> None:
    async with communicators() as (near, far):
        port = free_port()
        peer = near.peer(f"127.0.0.1:{port}")
        waiting = asyncio.ensure_future(peer.connect())
        await until(lambda: "refused" in peer._reason)
        await far.listen(f"127.0.0.1:{port}")
        assert (await waiting).peer.name == "far"


async def test_nobody_at_the_address_is_an_error_and_an_outcome() -> None:
    async with kvwire.open(handshake_timeout_s=0.3) as comm:
        peer = comm.peer(f"127.0.0.1:{free_port()}")
        # The first dial imports the backends, which may take longer than that.
        with pytest.raises(kvwire.ConnectError):
            await comm.connect(peer.where, timeout_s=30)
        incoming, outgoing = peer.pull("a", cache(), [0]), peer.push("b", cache(), [0])
        got, sent = bytearray(4), peer.send(1, b"x")
        received = peer.recv(2, got)
        with pytest.raises(kvwire.ConnectError, match=r"within 0\.3 s.*refused"):
            await sent
        with pytest.raises(kvwire.ConnectError):
            await received
        await sent.released()
        await received.released()
        outcome = await incoming
        assert not outcome.complete
        assert "refused" in str(outcome)
        assert not (await outgoing).complete
        await incoming.drained()
        await outgoing.drained()
        with pytest.raises(kvwire.ConnectError):
            await incoming.layer(0)
        # What has failed may be tried again.
        with pytest.raises(kvwire.ConnectError):
            await peer.connect()


async def test_a_process_that_has_ended_costs_its_time_once() -> None:
    """Later requests fail after one attempt, until one succeeds."""
    async with (
        kvwire.open(handshake_timeout_s=0.5) as near,
        kvwire.open(name="far") as far,
    ):
        port = free_port()
        peer = near.peer(f"127.0.0.1:{port}")
        with pytest.raises(kvwire.ConnectError):
            await near.connect(peer.where, timeout_s=30)
        with pytest.raises(kvwire.ConnectError, match=r"within 0\.5 s"):
            await peer.connect()
        for _ in range(3):
            began = inside.now()
            with pytest.raises(kvwire.ConnectError, match=r"still.*refused"):
                await peer.connect()
            assert not (await peer.pull("a", cache(), [0])).complete
            assert inside.now() - began < 0.4
        await far.listen(f"127.0.0.1:{port}")
        assert (await peer.connect()).peer.name == "far"


async def test_a_member_that_has_left_costs_its_time_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a", handshake_timeout_s=0.5) as (seeker, _):
        peer = seeker.peer("role=prefill")
        with pytest.raises(kvwire.ConnectError, match=r"within 0\.5 s"):
            await peer.connect()
        began = inside.now()
        with pytest.raises(kvwire.ConnectError, match=r"still no member.*matches"):
            await peer.connect()
        assert inside.now() - began < 0.4
        async with kvwire.open(directory=f"file:{tmp_path}", name="late") as late:
            await late.listen("127.0.0.1:0")
            late.announce(role="prefill")
            await until(lambda: inside.candidates(peer))
            assert (await peer.connect()).peer.name == "late"


@pytest.mark.parametrize("form", ["number", "instant", "timedelta"])
async def test_a_deadline_counts_while_a_peer_is_dialled(form: str) -> None:
    async with kvwire.open() as comm:
        peer = comm.peer(f"127.0.0.1:{free_port()}")
        late: Any = {
            "number": 0.1,
            "timedelta": timedelta(seconds=0.1),
            "instant": kvwire.Instant(asyncio.get_running_loop().time() + 0.1),
        }[form]
        with pytest.raises(kvwire.DeadlineExceeded, match="in time to peer '127"):
            await peer.send(1, b"x", deadline=late)
        outcome = await peer.pull("a", cache(), [0], deadline=late)
        assert not outcome.complete


@pytest.mark.parametrize("where", ["", "host", "=decode", "role=a,role=b"])
async def test_what_names_no_peer(where: str) -> None:
    async with kvwire.open() as comm:
        with pytest.raises(kvwire.UsageError):
            comm.peer(where)
        assert comm._peers == {}


async def test_who_does_not_know_the_key_is_told_at_once(tmp_path: Path) -> None:
    keys = [tmp_path / "one", tmp_path / "two"]
    for number, key in enumerate(keys):
        key.write_text(f"{number}" * 64)
        key.chmod(0o600)
    async with (
        kvwire.open(trust="psk", psk_file=str(keys[0])) as near,
        kvwire.open(trust="psk", psk_file=str(keys[1])) as far,
    ):
        peer = near.peer(str(await far.listen("127.0.0.1:0")))
        with pytest.raises(kvwire.AuthenticationFailed):
            await peer.send(1, b"secret")


async def test_a_closed_peer_and_a_closed_communicator() -> None:
    comm = await kvwire.open()
    peer = comm.peer(f"127.0.0.1:{free_port()}")
    sent, incoming = peer.send(1, b"x"), peer.pull("a", cache(), [0])
    await until(lambda: peer._reason)
    await peer.close()
    with pytest.raises(kvwire.ClosedOK):
        await sent
    assert not (await incoming).complete
    with pytest.raises(kvwire.ClosedOK):
        await peer.send(1, b"x")
    another = comm.peer(f"127.0.0.1:{free_port()}")
    sent = another.send(1, b"x")
    await comm.close()
    with pytest.raises(kvwire.ClosedOK):
        await sent
    with pytest.raises(kvwire.ClosedOK):
        another.pull("a", cache(), [0])
    with pytest.raises(kvwire.ClosedOK):
        comm.peer("127.0.0.1:1")


async def test_peers_are_bounded() -> None:
    async with kvwire.open() as comm:
        one, *_ = [comm.peer(f"127.0.0.1:{1 + at}") for at in range(PEERS_MAX)]
        with pytest.raises(kvwire.UsageError, match=r"4096 peers are open.*close\(\)"):
            comm.peer("127.0.0.1:5000")
        await one.close()
        comm.peer("127.0.0.1:5000")


# --- requests that wait for a connection ----------------------------------------------


async def test_a_receive_that_nobody_waits_for_takes_no_message() -> None:
    async with communicators() as (near, far):
        port = free_port()
        peer = near.peer(f"127.0.0.1:{port}")
        neglected = peer.recv(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await neglected
        await far.listen(f"127.0.0.1:{port}")
        wanted = peer.recv(1)
        inbound, got = await asyncio.gather(far.accept(), peer.connect())
        assert got is peer.connection
        await inbound.send(1, b"one")
        assert await wanted == b"one"
        assert not neglected.done()
        # Waited for again, it receives.
        await inbound.send(1, b"two")
        assert await neglected == b"two"


async def test_a_receive_that_nobody_awaits_has_released_its_memory() -> None:
    async with kvwire.open() as comm:
        peer = comm.peer(f"127.0.0.1:{free_port()}")
        request = peer.recv(1, bytearray(4))
        watching = asyncio.ensure_future(request.released())
        waiting = asyncio.ensure_future(request)
        await asyncio.sleep(0)
        assert not watching.done()
        waiting.cancel()
        async with asyncio.timeout(30):
            await watching
            await request.released()
        assert not request.done()
        assert "not posted: nobody awaits it" in repr(request)


async def test_a_wrong_grant_is_refused_with_or_without_a_connection() -> None:
    wrong: Any = b"a grant's bytes"
    async with communicators() as (near, far):
        port = free_port()
        peer = near.peer(f"127.0.0.1:{port}")
        with pytest.raises(kvwire.UsageError, match="grant"):
            peer.put(b"x", wrong)
        with pytest.raises(kvwire.UsageError, match="grant"):
            peer.get(wrong, bytearray(1))
        await far.listen(f"127.0.0.1:{port}")
        await peer.connect()
        with pytest.raises(kvwire.UsageError, match="grant"):
            peer.put(b"x", wrong)


async def test_requests_can_be_cancelled_before_and_after_the_connection() -> None:
    async with communicators() as (near, far):
        port = free_port()
        peer = near.peer(f"127.0.0.1:{port}")
        into = bytearray(4)
        before, after, neglected = peer.send(1, b"x"), peer.recv(2, into), peer.recv(3)
        before.cancel()
        with pytest.raises(kvwire.RequestCancelled):
            await before
        await before.released()
        released = asyncio.ensure_future(after.released())
        await far.listen(f"127.0.0.1:{port}")
        await peer.connect()
        await asyncio.sleep(0)
        assert not released.done()
        after.cancel()
        with pytest.raises(kvwire.RequestCancelled):
            await after
        await released
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await neglected
        neglected.cancel()
        assert neglected.done()
        with pytest.raises(kvwire.RequestCancelled):
            await neglected


async def test_an_error_that_is_not_ours_ends_a_request_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect() -> kvwire.Connection:
        raise LookupError("a directory's bug")

    async with kvwire.open() as comm:
        peer = comm.peer("127.0.0.1:1")
        monkeypatch.setattr(peer, "_connect", connect)
        with pytest.raises(kvwire.KVWireError, match="a directory's bug") as caught:
            await peer.send(1, b"x")
        assert isinstance(caught.value.__cause__, LookupError)


async def test_a_peer_checks_arguments_before_there_is_a_connection() -> None:
    async with kvwire.open() as comm:
        peer = comm.peer(f"127.0.0.1:{free_port()}")
        with pytest.raises(kvwire.UsageError, match="tag=-1"):
            peer.send(-1, b"x")
        with pytest.raises(kvwire.UsageError, match="read-only"):
            peer.recv(1, b"x")


async def test_the_end_of_a_peer_ends_what_waits_for_it() -> None:
    async with communicators() as (near, far):
        peer = near.peer(str(await far.listen("127.0.0.1:0")))
        received = peer.recv(1)
        await far.accept()
        incoming = peer.pull("never", cache(), [0], lease_s=0.2)
        far.abort()
        await far.close()
        with pytest.raises(kvwire.ConnectionClosed):
            await received
        assert not (await incoming).complete


async def test_a_transfer_that_begins_before_its_peer_is_there() -> None:
    async with communicators() as (near, far):
        port = free_port()
        peer = near.peer(f"127.0.0.1:{port}")
        pulled, pushed, source = tensors(), tensors(), cache(3.0)
        target, got = kvwire.PagedCache(SPEC, pulled), kvwire.PagedCache(SPEC, pushed)
        incoming = peer.pull("down", target, [1])
        outgoing = peer.push("up", source, [2])
        outgoing.ready()
        outgoing.finish()
        out = far.publish("down", source, [4])
        inc = far.expect("up", got, [5])
        out.ready()
        out.finish()
        await far.listen(f"127.0.0.1:{port}")
        await incoming.layer(1)
        assert (await incoming).complete
        assert (await outgoing).complete
        assert (await inc).complete
        assert (await out).complete
        assert all((tensor[1] == 3.0).all() for tensor in pulled)
        assert all((tensor[5] == 3.0).all() for tensor in pushed)
        # And one on the connection that is there now.
        again = far.publish("again", source, [4])
        again.ready()
        again.finish()
        assert (await peer.pull("again", target, [2])).complete


async def test_a_transfer_names_why_its_peer_is_not_connected() -> None:
    async with kvwire.open() as comm:
        peer = comm.peer(f"127.0.0.1:{free_port()}")
        # The first dial imports the backends, which may take longer than the deadline.
        with pytest.raises(kvwire.ConnectError):
            await comm.connect(peer.where, timeout_s=30)
        ends = (
            peer.pull("pulled", cache(), [0], deadline=1),
            peer.push("pushed", cache(), [0], deadline=1),
        )
        why = f"there is no connection to peer {peer.where!r}: "
        assert all(why in repr(end) for end in ends)
        for end in ends:
            (reason,) = (await end).missing.reasons
            assert f"deadline passed: {why}cannot connect to" in reason


async def test_a_transfer_that_is_aborted_before_its_peer_is_there() -> None:
    async with communicators() as (near, far):
        port = free_port()
        peer = near.peer(f"127.0.0.1:{port}")
        incoming = peer.pull("x", cache(), [0])
        await turns(3)
        assert any("_dial" in repr(task) for task in asyncio.all_tasks())
        incoming.abort("not needed")
        assert not (await incoming).complete
        await incoming.drained()
        await turns(3)
        assert not any("_dial" in repr(task) for task in asyncio.all_tasks())
        await far.listen(f"127.0.0.1:{port}")
        await peer.connect()
        assert inside.questions(far) == []


# --- by what it does ------------------------------------------------------------------


async def test_a_member_is_found_by_what_it_says_of_itself(tmp_path: Path) -> None:
    async with fleet(tmp_path, "ab") as (seeker, _):
        assert await name_of(seeker.peer("role=decode,zone=b")) == "b"
        assert await name_of(seeker.peer("name=a")) == "a"


async def test_two_members_with_another_key_are_a_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However often they are tried."""
    caplog.set_level("INFO", "kvwire")
    for name in ("mine", "other"):
        write_key_file(tmp_path / name)
    options: dict[str, Any] = {"trust": "psk", "handshake_timeout_s": PATIENCE_S}
    async with (
        fleet(tmp_path / "members", "ab", **options, psk_file=str(tmp_path / "other")),
        kvwire.open(
            directory=f"file:{tmp_path / 'members'}?interval_s=0.02",
            psk_file=str(tmp_path / "mine"),
            **options,
        ) as seeker,
    ):
        peer = seeker.peer("role=decode")
        sent = peer.send(1, b"x")
        await until(lambda: caplog.text.count("peer 'role=decode'") >= 6)
        await peer.close()
        with pytest.raises(kvwire.ClosedOK):
            await sent
    said = [line for line in warned(caplog) if "peer 'role=decode'" in line]
    assert len(said) == 2
    assert all("does not hold the same key" in line for line in said)


async def test_a_peer_that_has_another_key_again_is_a_second_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("mine", "other"):
        write_key_file(tmp_path / name)
    port = free_port()
    options: dict[str, Any] = {"trust": "psk", "handshake_timeout_s": 20.0}

    def has_warned(times: int) -> bool:
        return sum(f"'127.0.0.1:{port}'" in one for one in warned(caplog)) >= times

    async with kvwire.open(psk_file=str(tmp_path / "mine"), **options) as seeker:
        peer = seeker.peer(f"127.0.0.1:{port}")
        for key, times in (("other", 1), ("mine", 1), ("other", 2)):
            async with kvwire.open(psk_file=str(tmp_path / key), **options) as member:
                await member.listen(f"127.0.0.1:{port}")
                if key == "mine":
                    await peer.connect()
                    continue
                waiting = asyncio.create_task(peer.connect())
                await until(partial(has_warned, times))
                waiting.cancel()
        await peer.close()
    assert not has_warned(3)


async def test_who_aborts_is_no_member_any_more(tmp_path: Path) -> None:
    """Its connections have ended, so nobody should be sent there."""
    async with fleet(tmp_path, "ab") as (seeker, members):
        assert not await seeker.members("role=prefill")  # from now on it watches
        await until(lambda: len(inside.members(seeker)) == 2)
        members[0].abort()
        await until(lambda: len(inside.members(seeker)) == 1)
        (left,) = await seeker.members("role=decode")
        assert left.name == "b"


async def test_the_least_busy_is_dialled_and_stays_the_peer(tmp_path: Path) -> None:
    async with fleet(tmp_path, "ab") as (seeker, members):
        members[0].announce(role="decode", load=0.1)
        members[1].announce(role="decode", load=0.9)
        await until(lambda: loads(tmp_path) == [0.1, 0.9])
        peer = seeker.peer("role=decode")
        assert await name_of(peer) == "a"
        members[0].announce(role="decode", load=1.0)
        await until(
            lambda: (
                min(inside.members(seeker).values(), key=lambda one: one.load).name
                == "b"
            )
        )
        assert (await seeker.members("role=decode"))[0].name == "b"
        assert await name_of(peer) == "a"


async def test_members_are_listed_and_each_may_be_a_peer(tmp_path: Path) -> None:
    async with fleet(tmp_path, "abc") as (seeker, members):
        for number, member in enumerate(members):
            zone = {"zone": "even" if number % 2 == 0 else "odd"}
            member.announce(role="decode", load=0.9 - number / 10, labels=zone)
        await until(lambda: loads(tmp_path) == [0.7, 0.8, 0.9])
        found = await seeker.members("role=decode")
        assert [one.name for one in found] == ["c", "b", "a"], "the least busy first"
        assert [one.name for one in await seeker.members("zone=even")] == ["c", "a"]
        assert {one.name for one in await seeker.members()} == set("abc")
        assert {one.name for one in await members[0].members()} == set("bc")
        assert await seeker.members("role=prefill") == ()
        peers = [seeker.peer(one) for one in found]
        assert [await name_of(peer) for peer in peers] == ["c", "b", "a"]
        assert peers[0].where == seeker.peer(found[0]).where
        with pytest.raises(kvwire.UsageError, match="is not a valid term"):
            await seeker.members("decode")
        # It is one start of a process, and nobody else in its place.
        await members[2].close()
        await until(lambda: loads(tmp_path) == [0.8, 0.9])
        await until(lambda: peers[0].connection is None)
        with pytest.raises(kvwire.ConnectError):
            await peers[0].connect()


async def test_lanes_of_one_of_many_members_have_as_much_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that answers gets the time that others would have needed to answer."""

    use(monkeypatch, HangingLane, "client")
    impatient(monkeypatch, 0.01)
    options: dict[str, Any] = {**BESIDE, "handshake_timeout_s": PATIENCE_S}
    async with fleet(tmp_path, "abcd", **options) as (seeker, _):
        peer = seeker.peer("role=decode")
        await until(lambda: len(inside.candidates(peer)) == 4)
        connection = await peer.connect()
        assert connection.transport == "tcp"
        why = reasons(connection.transport_report)["inproc"]
    found = re.search(r"did not open within (\S+) s", why)
    assert found, why
    assert float(found[1]) > 0.01 * PATIENCE_S / 2  # and not a quarter


async def test_a_member_that_is_dead_is_named(tmp_path: Path) -> None:
    """Its record outlives it, with an address at which nobody listens."""
    async with fleet(tmp_path, "a", handshake_timeout_s=1.0) as (seeker, (member,)):
        dead = f"127.0.0.1:{free_port()}"
        member.announce(role="decode", address=dead, labels={"dead": "yes"})
        peer = seeker.peer("dead=yes")
        why = ""
        # Its record comes soon, and the first dial imports the backends.
        async with asyncio.timeout(PATIENCE_S):
            while "'a': cannot connect to tcp://1" not in why:
                with pytest.raises(kvwire.ConnectError) as refused:
                    await peer.connect()
                why = str(refused.value)


async def test_a_member_without_an_incarnation_is_an_address() -> None:
    async with communicators() as (near, far):
        address = await far.listen("127.0.0.1:0")
        peer = near.peer(record(incarnation="", address=str(address)))
        assert await name_of(peer) == "far"


async def test_members_of_a_directory_that_is_away(tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    async with kvwire.open(directory=url) as seeker:
        with pytest.raises(kvwire.ConnectError, match="directory redis"):
            await seeker.members("role=decode")
    async with kvwire.open(directory=f"file:{tmp_path}/nobody") as seeker:
        assert await seeker.members() == ()
    with pytest.raises(kvwire.ClosedOK):
        await seeker.members()


async def test_a_record_has_what_others_choose_by(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a") as (seeker, members):
        (member,) = members
        member.announce(role="decode", cache=cache(), labels={"rack": "7"}, load=0.5)
        await name_of(seeker.peer("rack=7"))
        (found,) = await FileDirectory(f"file:{tmp_path}").members()
        assert found.name == "a"
        assert found.model == "m"
        assert found.incarnation == member.incarnation.hex()
        assert found.transports[0] in ("local", "tcp")
        (digest,) = found.specs.values()
        assert await name_of(seeker.peer(f"spec={digest}")) == "a"


async def test_a_member_that_is_withdrawn_is_replaced(tmp_path: Path) -> None:
    async with fleet(tmp_path, "ab", lease_s=0.1) as (seeker, members):
        peer = seeker.peer("role=decode")
        await until(lambda: len(inside.candidates(peer)) == 2)
        first = await peer.connect()
        going = next(m for m in members if m.name == first.peer.name)
        await going.withdraw()
        await until(lambda: peer.connection is not first)
        assert (await peer.connect()).peer.name != first.peer.name
        # What is idle and used for nothing new is closed in the end.
        await first.wait_closed()


async def test_a_lost_record_does_not_end_a_connection(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a") as (seeker, members):
        peer = seeker.peer("role=decode")
        first = await peer.connect()
        await members[0].withdraw()
        await until(lambda: not inside.candidates(peer))
        assert peer.connection is first
        await peer.send(1, b"still there")
        members[0].announce(role="decode")
        await until(lambda: peer._record is not None)
        assert peer.connection is first


async def test_a_restarted_member_is_found_at_its_new_address(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a") as (seeker, members):
        peer = seeker.peer("name=a")
        first = await peer.connect()
        await members[0].close()
        async with kvwire.open(members[0].config) as restarted:
            await restarted.listen("127.0.0.1:0")
            restarted.announce(role="decode")
            assert (await peer.connect()).peer.incarnation == restarted.incarnation
            assert first.closed


async def test_nobody_finds_itself(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a", handshake_timeout_s=0.3) as (_, members):
        with pytest.raises(kvwire.ConnectError, match="no member matches"):
            await members[0].peer("role=decode").connect()


async def test_forged_records_cost_attempts_and_no_more(tmp_path: Path) -> None:
    """They say that they are idle, so they come first."""
    async with fleet(tmp_path, "a") as (seeker, members):
        members[0].announce(role="decode", load=1.0)
        other = await kvwire.open(name="other")
        forged = FileDirectory(f"file:{tmp_path}")
        where = [f"127.0.0.1:{free_port()}", str(await other.listen("127.0.0.1:0"))]
        where += ["nothing://host:1", "127.0.0.1:1"]
        for number, address in enumerate(where):
            await forged.announce(record(number, role="decode", address=address))
        peer = seeker.peer("role=decode")
        await until(lambda: len(inside.candidates(peer)) == 5)
        sent = peer.send(1, b"for a")
        inbound = await members[0].accept()
        assert await inbound.recv(1) == b"for a"
        await sent
        assert (await peer.connect()).peer.name == "a"
        await forged.close()
        await other.close()


async def test_a_record_of_another_start_is_not_believed(tmp_path: Path) -> None:
    async with (
        fleet(tmp_path, "", handshake_timeout_s=0.3) as (seeker, _),
        kvwire.open(name="somebody") as somebody,
    ):
        address = str(await somebody.listen("127.0.0.1:0"))
        forged = FileDirectory(f"file:{tmp_path}")
        await forged.announce(record(1, role="decode", address=address))
        with pytest.raises(
            kvwire.ConnectError, match=r"now belongs to .*, no longer to 00000000"
        ):
            await seeker.peer("role=decode").connect()
        await until(lambda: not somebody.live_connections)
        await forged.close()


async def test_attempts_of_a_round_are_bounded(tmp_path: Path) -> None:
    async with fleet(tmp_path, "", handshake_timeout_s=0.3) as (seeker, _):
        forged = FileDirectory(f"file:{tmp_path}")
        for number in range(1, 40):
            await forged.announce(record(number, role="decode"))
        peer = seeker.peer("role=decode")
        await until(lambda: len(inside.members(seeker)) == 39)
        assert len(inside.candidates(peer)) == 16
        with pytest.raises(kvwire.ConnectError, match="refused"):
            await peer.connect()
        # Who has failed comes last, so that everybody's turn comes.
        failures = peer._failures
        counts = [failures.get(record(n).key, 0) for n in range(1, 40)]
        assert max(counts) - min(counts) <= 1
        await forged.close()


@pytest.mark.parametrize(
    ("listens", "options", "words"),
    [
        ("", {}, "listen first"),
        ("0.0.0.0:0", {}, "every interface .*pass address="),
        ("127.0.0.1:0", {"load": -1.0}, "Expected `float` >= 0"),
        ("127.0.0.1:0", {"role": "x\n"}, "cannot be printed"),
    ],
)
async def test_what_cannot_be_announced(
    tmp_path: Path, listens: str, options: dict[str, Any], words: str
) -> None:
    key = tmp_path / "key"
    key.write_text("a" * 64)
    key.chmod(0o600)
    async with kvwire.open(
        directory=f"file:{tmp_path}", trust="psk", psk_file=str(key)
    ) as comm:
        if listens:
            await comm.listen(listens)
        with pytest.raises(kvwire.UsageError, match=words):
            comm.announce(**options)


async def test_an_address_may_be_said(tmp_path: Path) -> None:
    async with kvwire.open(directory=f"file:{tmp_path}?interval_s=0.02") as comm:
        comm.announce(address=kvwire.Address("tcp", "10.0.0.7", 7400))
        directory = FileDirectory(f"file:{tmp_path}?interval_s=0.02")
        async for change in directory.watch():
            assert change.record.address == "tcp://10.0.0.7:7400"
            break
