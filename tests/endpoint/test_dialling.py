"""A name with several addresses: all are bound, and the first that answers is used."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvwire
import kvwire_store
from kvwire import Address, ConnectError, ListenError, UsageError
from kvwire.backend import Backend, Link
from kvwire.backend.link import Availability, Capabilities
from kvwire.config import Config
from kvwire.endpoint.dialling import Dialling
from kvwire.limits import DIAL_DELAY_S
from kvwire.security.keys import write_key_file
from kvwire.types import TrustMode
from kvwire_store.server.client import ask_report
from tests.support import inside
from tests.support.caches import Memory
from tests.support.names import Zone
from tests.support.pairs import communicators, until
from tests.support.waiting import PATIENCE_S

LOCAL, LOCAL_6, SILENT = "127.0.0.1", "::1", "127.0.0.2"
NAME = "decode.test"
Resolver = Callable[..., None]


@pytest.fixture
async def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    """Set which addresses the name has."""
    zone = Zone(monkeypatch)

    def name_means(*hosts: str) -> None:
        zone.hosts = [*hosts]

    return name_means


@pytest.fixture
def silent() -> Iterator[int]:
    """A port of an address whose backlog is full, so that nothing answers there."""
    if sys.platform != "linux":
        pytest.skip("only Linux has all of 127.0.0.0/8")
    waiting = []
    with socket.socket() as listening:
        listening.bind((SILENT, 0))
        listening.listen(0)
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
    for sock in waiting:
        sock.close()


@pytest.fixture(params=["loopback", "psk"])
def trust(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Each trust mode that needs no certificate."""
    if request.param == "loopback":
        return {}
    write_key_file(tmp_path / "key")
    return {"trust": "psk", "psk_file": str(tmp_path / "key")}


# --- dialling -------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [(LOCAL, LOCAL_6), (LOCAL_6, LOCAL)])
async def test_an_address_that_refuses_is_followed_by_the_next(
    trust: dict[str, Any], resolver: Resolver, hosts: tuple[str, str]
) -> None:
    async with communicators(**trust) as (near, far):
        address = await far.listen(f"{LOCAL}:0")
        resolver(*hosts)
        connection = await near.connect(f"{NAME}:{address.port}")
        assert connection.peer.address == address
        assert connection.peer.incarnation == far.incarnation


async def test_an_address_that_is_silent_is_not_waited_for(
    trust: dict[str, Any], resolver: Resolver, silent: int
) -> None:
    async with communicators(**trust) as (near, far):
        address = await far.listen(f"{LOCAL}:{silent}")
        resolver(SILENT, LOCAL)
        connection = await near.connect(f"{NAME}:{silent}")
        assert connection.peer.address == address


async def test_what_became_of_each_address_is_said(
    resolver: Resolver, silent: int
) -> None:
    async with kvwire.open(handshake_timeout_s=2 * DIAL_DELAY_S) as near:
        resolver(SILENT, LOCAL)
        with pytest.raises(ConnectError) as caught:
            await near.connect(f"{NAME}:{silent}")
        text = str(caught.value)
        assert f"tcp://{NAME}:{silent}: tcp://{SILENT}:{silent}: no answer" in text
        assert f"tcp://{LOCAL}:{silent}: Connection refused" in text
        assert caught.value.errno == errno.ETIMEDOUT
        assert caught.value.address == f"tcp://{NAME}:{silent}"


# uvloop looks names up by threads of its own.
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_name_that_was_not_looked_up_is_not_a_peer_that_is_silent() -> None:
    """The threads of the loop's default executor have other work."""
    over = threading.Event()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as busy:
        loop.set_default_executor(busy)
        work = loop.run_in_executor(None, over.wait, PATIENCE_S)
        try:
            async with kvwire.open(handshake_timeout_s=0.2) as near:
                with pytest.raises(ConnectError) as caught:
                    await near.connect("localhost:7400")
        finally:
            over.set()
            await work
    assert str(caught.value) == (
        "cannot connect to tcp://localhost:7400: the name 'localhost' was not looked "
        "up within 0.2 s: the resolver does not answer, or other work keeps all "
        "threads of the loop's default executor busy"
    )


async def test_a_name_of_which_every_address_refuses(resolver: Resolver) -> None:
    with socket.create_server((LOCAL, 0)) as unused:
        port = unused.getsockname()[1]
    async with kvwire.open() as near:
        resolver(LOCAL, "127.0.0.1", LOCAL_6)
        with pytest.raises(ConnectError, match=r"refused; .*refused") as caught:
            await near.connect(f"{NAME}:{port}")
        assert caught.value.errno == errno.ECONNREFUSED
        assert str(caught.value).count(LOCAL) == 1
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)


async def test_a_store_is_asked_at_any_of_its_addresses(resolver: Resolver) -> None:
    async with (
        kvwire_store.BlockStore.open(["memory:1MiB"]) as store,
        kvwire_store.StoreServer(store, f"{LOCAL}:0") as server,
    ):
        resolver(LOCAL_6, LOCAL)
        where = f"{NAME}:{server.address.port}"
        assert len((await ask_report(where, Config())).tiers) == 1
        async with kvwire_store.BlockStore.open([f"kvwire://{where}"]) as client:
            assert not any(client.report.values())


@pytest.mark.parametrize("hosts", [(LOCAL, "192.0.2.7"), ("192.0.2.7", LOCAL)])
async def test_one_address_that_others_reach_needs_a_trust_mode(
    resolver: Resolver, hosts: tuple[str, str]
) -> None:
    resolver(*hosts)
    async with kvwire.open() as comm:
        for verb in (comm.connect, comm.listen):
            with pytest.raises(
                UsageError, match=r"192\.0\.2\.7, .*other hosts can reach"
            ):
                await verb(f"{NAME}:7400")


async def test_dialling_that_is_cancelled_leaves_nothing(
    resolver: Resolver, silent: int
) -> None:
    """What it leaves the check around every test would find."""
    async with kvwire.open() as near:
        resolver(SILENT, SILENT.replace(".2", ".3"), SILENT.replace(".2", ".4"))
        dialling = asyncio.create_task(near.connect(f"{NAME}:{silent}"))
        await asyncio.sleep(0)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling
        assert not near.live_connections


async def half_way(
    near: kvwire.Communicator, far: kvwire.Communicator, where: str
) -> tuple[kvwire.Outgoing, kvwire.Incoming]:
    """A transfer of which one layer of four has landed, on a connection to a name."""
    connection = await near.connect(where)
    out = far.publish("t", Memory().cache, [1])
    inc = connection.pull("t", Memory().cache, [2])
    out.ready(layers=0)
    await inc.layer(0)
    return out, inc


async def finished(out: kvwire.Outgoing, inc: kvwire.Incoming) -> bool:
    """Whether the rest of it arrives."""
    out.ready(layers=slice(1, 4))
    out.finish()
    return (await inc).complete and (await out).complete


def cut_off(near: kvwire.Communicator, host: str, times: int) -> None:
    """Make an address unreachable for so many attempts."""
    backend = inside.services(near)._backends["tcp"]
    connect, left = backend.connect, [times]

    async def unreachable(address: Address) -> Link:
        if address.host == host and left[0]:
            left[0] -= 1
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        return await connect(address)

    backend.connect = unreachable  # type: ignore[method-assign]


async def test_a_peer_that_is_lost_at_one_address_is_found_at_another(
    resolver: Resolver,
) -> None:
    """As where one of the networks of a host is gone; it is the same process."""
    async with communicators() as (near, far):
        port = (await far.listen(f"{LOCAL}:0")).port
        await far.listen(f"[{LOCAL_6}]:{port}")
        resolver(LOCAL, LOCAL_6)
        out, inc = await half_way(near, far, f"{NAME}:{port}")
        cut_off(near, LOCAL, 1000)
        far.live_connections[0].abort("its network is gone")
        assert await finished(out, inc)
        (connection,) = near.live_connections
        assert connection.peer.address == Address("tcp", LOCAL_6, port)


async def test_another_process_behind_the_name_is_not_the_peer(
    resolver: Resolver,
) -> None:
    """One that can be reached again goes on, whoever else has the name."""
    async with communicators() as (near, far), kvwire.open(name="other") as other:
        port = (await far.listen(f"{LOCAL}:0")).port
        await other.listen(f"[{LOCAL_6}]:{port}")
        resolver(LOCAL, LOCAL_6)
        out, inc = await half_way(near, far, f"{NAME}:{port}")
        cut_off(near, LOCAL, 3)
        far.live_connections[0].abort("cut by the test")
        await until(lambda: other.counters.connections)  # and it is not the one
        assert await finished(out, inc)


class Slow(Backend):
    """A transport of which each address comes up once all were dialled."""

    scheme = "slow"
    capabilities = Capabilities()

    def __init__(self, links: dict[str, Link]) -> None:
        self._links = links
        self._left = len(links)
        self._all = asyncio.Event()

    @classmethod
    def availability(cls) -> Availability:
        return Availability(available=True, reason="a test's own")

    async def connect(self, address: Address) -> Link:
        self._left -= 1
        if not self._left:
            self._all.set()
        await self._all.wait()
        return self._links[address.host]


class Ended:
    """A link that only notes its end."""

    aborted = False

    def abort(self) -> None:
        """Note it."""
        self.aborted = True


async def test_of_two_that_come_up_at_once_one_is_ended(resolver: Resolver) -> None:
    resolver(LOCAL, SILENT)
    links: dict[str, Any] = {LOCAL: Ended(), SILENT: Ended()}
    name = Address("slow", NAME, 1)
    _, taken = await Dialling(name, Slow(links), TrustMode.LOOPBACK).link()
    await asyncio.sleep(0)
    assert all(one.aborted is (one is not taken) for one in links.values())


# --- listening ------------------------------------------------------------------------


async def test_every_address_of_a_name_is_listened_on(
    trust: dict[str, Any], resolver: Resolver
) -> None:
    async with communicators(**trust) as (near, far):
        resolver(LOCAL_6, LOCAL)
        address = await far.listen(f"{NAME}:0")
        assert address.host == LOCAL_6
        assert address.port
        for host in (LOCAL, f"[{LOCAL_6}]"):
            connection = await near.connect(f"{host}:{address.port}")
            assert connection.peer.incarnation == far.incarnation


async def test_addresses_that_this_host_lacks_are_passed_over(
    tmp_path: Path, resolver: Resolver
) -> None:
    write_key_file(tmp_path / "key")
    async with kvwire.open(trust="psk", psk_file=str(tmp_path / "key")) as comm:
        resolver("192.0.2.7", LOCAL)
        assert (await comm.listen(f"{NAME}:0")).host == LOCAL
        resolver("192.0.2.7")
        with pytest.raises(ListenError) as caught:
            await comm.listen(f"{NAME}:0")
        assert caught.value.errno == errno.EADDRNOTAVAIL


async def test_a_name_of_which_one_address_is_taken(resolver: Resolver) -> None:
    resolver(LOCAL, LOCAL_6)
    async with communicators() as (near, far):
        taken = await far.listen(f"[{LOCAL_6}]:0")
        with pytest.raises(ListenError) as caught:
            await near.listen(f"{NAME}:{taken.port}")
        assert caught.value.errno == errno.EADDRINUSE
        with pytest.raises(ConnectError):  # nothing stayed bound
            await far.connect(f"{LOCAL}:{taken.port}")


async def test_any_port_is_one_that_is_free_at_every_address(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver(LOCAL, LOCAL_6)
    real, refused = socket.socket.bind, list[Any]()

    def bind(sock: socket.socket, address: Any) -> None:
        if address[0] == LOCAL_6 and not refused:
            refused.append(address)
            raise OSError(errno.EADDRINUSE, "taken")
        real(sock, address)

    monkeypatch.setattr(socket.socket, "bind", bind)
    async with communicators() as (near, far):
        address = await far.listen(f"{NAME}:0")
        assert refused
        for host in (LOCAL, f"[{LOCAL_6}]"):
            await near.connect(f"{host}:{address.port}")
