"""After a lost connection: who redials, how often, and what goes on."""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

import kvwire
from kvwire import ConnectionLost
from kvwire.endpoint.reconnect import REDIAL_S_MAX, _was_reset
from kvwire_inproc import FaultPlan, injected
from tests.support import inside, virtual_time
from tests.support.caches import Memory, same
from tests.support.proxy import Proxy
from tests.support.world import DEST, LIST, World, play, scenario

LEASE_S = 5.0


async def half_way(w: World) -> tuple[kvwire.Outgoing, kvwire.Incoming]:
    """A transfer of which two of four layers have landed."""
    out, inc = w.begin()
    out.ready(layers=slice(0, 2))
    await inc.layer(1)
    return out, inc


async def cut_and_resumed(w: World, inc: kvwire.Incoming) -> None:
    """Lose the link, and wait until the transfer is on the next one."""
    before = inside.carrier(inc)
    w.cut()
    await w.until(lambda: inside.carrier(inc) is not before)


@pytest.fixture
def each_breaks() -> Iterator[None]:
    """Every link breaks soon, the first ones as well."""
    with injected(FaultPlan(seed=1, kill=1.0, kill_after=3, spare=4)):
        yield


@pytest.mark.usefixtures("each_breaks")
@scenario("inproc", lease_s=LEASE_S)
async def test_a_link_that_breaks_each_time_is_dialled_with_pauses_until_the_lease(
    w: World,
) -> None:
    """It makes no progress, so nothing renews the lease."""
    dialled = Counter[str]()
    redial = inside.links(w.d).redial

    async def counted(lost: kvwire.Connection) -> kvwire.Connection:
        dialled["times"] += 1
        return await redial(lost)

    inside.links(w.d).redial = counted  # type: ignore[method-assign]
    out, inc = w.begin()
    out.ready()
    out.finish()
    began = inside.now()
    assert not (await inc).complete
    assert not (await out).complete
    assert inside.now() - began < 2 * LEASE_S
    assert 0 < dialled["times"] < 2 * LEASE_S / REDIAL_S_MAX


@scenario("inproc", lease_s=LEASE_S)
async def test_a_peer_that_stays_away_is_dialled_less_and_less_often(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    dialled_at: list[float] = []

    async def nobody_listens(lost: kvwire.Connection) -> kvwire.Connection:
        dialled_at.append(inside.now())
        raise kvwire.ConnectError("nobody listens")

    inside.links(w.d).redial = nobody_listens  # type: ignore[method-assign]
    _, inc = await half_way(w)
    w.cut()
    assert not (await inc).complete
    pauses_s = [late - early for early, late in itertools.pairwise(dialled_at)]
    assert pauses_s[:5] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.5])
    assert set(pauses_s[5:]) == {REDIAL_S_MAX}


@scenario("inproc", lease_s=LEASE_S)
async def test_progress_renews_the_lease(w: World) -> None:
    """Each link brings one layer, and there are more links than one lease has time."""
    out, inc = w.begin()
    for layer in range(3):
        out.ready(layers=layer)
        await inc.layer(layer)
        w.cut()
        await virtual_time.pass_time(0.8 * LEASE_S)
    out.ready(layers=3)
    out.finish()
    assert (await inc).complete


@pytest.mark.parametrize("grace_s", [0.5, 4.0])
def test_another_process_that_keeps_the_peers_address_is_the_peers_end(
    grace_s: float,
) -> None:
    """As after a restart: by default a name has the process's number in it.

    Not at once, since a balancer may have led there.
    """

    async def body(w: World) -> None:
        _, inc = await half_way(w)
        w.p.abort()
        await w.p.close()
        began = inside.now()
        async with kvwire.open(name="other") as other:
            assert await other.listen(w.address) == w.address
            outcome = await inc
            took_s = inside.now() - began
            assert max(1.0, grace_s) <= took_s < max(grace_s, 4.0) + 1
            said = "the peer has ended: 'other' has its address now"
            assert any(said in str(reason) for reason in outcome.missing.reasons)
            w.p = other

    play(body, "inproc", restart_grace_s=grace_s)


async def test_a_transfer_finds_its_peer_again_behind_a_balancer() -> None:
    source, target = Memory(), Memory()
    async with (
        kvwire.open(name="prefill-0") as first,
        kvwire.open(name="prefill-1") as second,
        kvwire.open(name="decode") as reader,
    ):
        theirs = await first.listen("127.0.0.1:0")
        async with Proxy(theirs) as balancer:
            c = await reader.connect(str(balancer.address), transport="tcp")
            out = first.publish("x", source.cache, LIST)
            inc = c.pull("x", target.cache, DEST)
            out.ready(layers=0)
            await inc.layer(0)
            balancer.server = await second.listen("127.0.0.1:0")
            redial = inside.links(reader).redial
            answered: list[str] = []

            async def noted(lost: kvwire.Connection) -> kvwire.Connection:
                found = await redial(lost)
                answered.append(found.peer.name)
                balancer.server = theirs
                return found

            inside.links(reader).redial = noted  # type: ignore[method-assign]
            inside.link(c).abort()
            out.ready(layers=slice(1, None))
            out.finish()
            assert (await inc).complete
            assert answered == ["prefill-1", "prefill-0"]
    assert same(source, LIST, target, DEST)


@scenario("inproc")
async def test_one_redial_for_all_transfers_and_connections_of_a_peer(w: World) -> None:
    other = await w.d.connect(w.address)
    ends: list[tuple[kvwire.Outgoing, kvwire.Incoming]] = []
    for name, connection in (("a", w.pull_side), ("b", other), ("c", other)):
        out = w.p.publish(name, w.source.cache, LIST)
        blocks = [10 + len(ends) * 5 + n for n in range(5)]
        ends.append((out, connection.pull(name, w.target.cache, blocks)))
        out.ready(layers=0)
        await ends[-1][1].layer(0)
    w.cut()
    await w.until(lambda: w.d.live_connections)
    for out, inc in ends:
        out.ready(layers=slice(1, 4))
        out.finish()
        assert (await inc).complete
    assert len(w.d.live_connections) == 1


@scenario("inproc")
async def test_an_open_connection_to_the_same_peer_is_taken_before_a_new_one(
    w: World,
) -> None:
    other = await w.d.connect(w.address)
    out, inc = await half_way(w)
    w.push_side.abort("this one alone")
    out.ready(layers=slice(2, 4))
    out.finish()
    assert (await inc).complete
    assert w.d.live_connections == (other,)


@scenario("inproc", lease_s=LEASE_S)
async def test_a_link_made_for_transfers_is_closed_when_they_are_over(w: World) -> None:
    out, inc = await half_way(w)
    w.cut()
    await w.until(lambda: w.d.live_connections)
    out.abort("the rest is not needed")
    await inc
    await virtual_time.pass_time(2 * LEASE_S)
    assert not w.d.live_connections
    assert not w.p.live_connections


@scenario("inproc")
async def test_a_closed_connection_is_not_redialled(w: World) -> None:
    out, inc = await half_way(w)
    await w.pull_side.close()
    assert not (await inc).complete
    assert not (await out).complete
    await virtual_time.pass_time(LEASE_S)
    assert not w.d.live_connections


# --- a peer whose process has ended ---------------------------------------------------


@pytest.mark.parametrize("grace_s", [1.0, 3.0])
def test_a_peer_whose_port_is_refused_has_a_moment_and_not_a_lease(
    grace_s: float,
) -> None:
    async def run(w: World) -> None:
        _, inc = await half_way(w)
        began = inside.now()
        w.p.abort()
        await w.p.close()
        outcome = await inc
        assert inside.now() - began == pytest.approx(grace_s, abs=0.1)
        assert "the peer has ended: cannot connect to" in str(outcome.missing)
        assert outcome.missing

    play(run, "inproc", restart_grace_s=grace_s)


@pytest.mark.parametrize("grace_s", [1.0, 3.0])
def test_a_peer_that_dials_has_the_same_moment(grace_s: float) -> None:
    async def run(w: World) -> None:
        out, _ = await half_way(w)
        began = inside.now()
        w.d.abort()
        outcome = await out
        assert inside.now() - began == pytest.approx(grace_s, abs=0.1)
        assert "was reset, and it was not back within" in str(outcome.missing)

    play(run, "inproc", restart_grace_s=grace_s)


@scenario("inproc")
async def test_a_peer_that_is_back_in_time_goes_on(w: World) -> None:
    """Nothing that began for the first loss ends what the second link carries."""
    out, inc = await half_way(w)
    for _ in range(2):
        await cut_and_resumed(w, inc)
    await virtual_time.pass_time(5.0)
    out.ready(layers=slice(2, 4))
    out.finish()
    assert (await inc).complete
    assert (await out).complete


def test_only_silence_waits_for_the_lease() -> None:
    said = ConnectionLost("somewhere")
    assert _was_reset(said)
    said.__cause__ = OSError(errno.ETIMEDOUT, "timed out")
    assert not _was_reset(said)
    said.__cause__ = ConnectionResetError(errno.ECONNRESET, "reset")
    assert _was_reset(said)
    assert not _was_reset(kvwire.PeerUnresponsive("silent"))


async def test_a_redial_asks_for_the_transports_that_were_named() -> None:
    """An iterator of them was used up: anything could carry the data then."""
    async with kvwire.open(name="near") as near, kvwire.open(name="far") as far:
        where = await far.listen("tcp://127.0.0.1:0")
        first = await near.connect(where, transport=iter(["tcp"]))
        again = await inside.links(near).redial(first)
        assert first.transport == again.transport == "tcp"
