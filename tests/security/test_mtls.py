"""Trust mode ``mtls`` from end to end: who connects, what moves, and what is said."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

import kvwire
from kvwire import AuthenticationFailed, HandshakeError, UsageError
from kvwire.limits import KIB
from kvwire.security.keys import write_key_file
from kvwire.types import PeerInfo, TrustMode
from kvwire_tcp.lane import LaneSocket, TcpLane
from kvwire_tcp.tls_wire import TlsWire
from kvwire_tcp.wire import PlainWire, Wire
from tests.support import inside
from tests.support.caches import Memory, same
from tests.support.certificates import FAR, NEAR, Authority, issue
from tests.support.lanes import expect_moves
from tests.support.logs import warned
from tests.support.pairs import Pair, communicators, connected, until

OTHER = "spiffe://kvwire.test/other"
SPEC = kvwire.KVSpec(
    layers=6, kv_heads=4, head_dim=64, block_tokens=16, dtype="float32"
)
BLOCKS = list(range(16))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
async def pair(authority: Authority) -> AsyncIterator[Pair]:
    near, far = authority.config(NEAR, FAR), authority.config(FAR, NEAR)
    async with connected(
        near=near, far=far, prefer=("tcp",), lanes=2, lease_s=5.0
    ) as made:
        yield made


def reasons(connection: kvwire.Connection) -> dict[str, str]:
    return {c.name: c.reason for c in connection.transport_report}


# --- it works -------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_the_first_message_has_the_name_that_was_dialled(
    authority: Authority, host: str
) -> None:
    """A router that passes TLS through has nothing else to go by; lanes have it too."""
    firsts: list[bytes] = []

    async def route(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        firsts.append(await reader.read(4096))
        writer.close()

    near, far = authority.config(NEAR, FAR), authority.config(FAR, NEAR)
    async with (
        communicators(near, far, prefer=("tcp",)) as (a, b),
        await asyncio.start_server(route, "127.0.0.1", 0) as router,
    ):
        port = router.sockets[0].getsockname()[1]
        with pytest.raises(kvwire.ConnectionLost):
            await a.connect(f"{host}:{port}")
        assert (host.encode() in firsts[0]) is (host == "localhost")
        where = await b.listen("127.0.0.1:0")
        connection = await a.connect(f"{host}:{where.port}")
        peer = connection.peer.address
        assert peer is not None
        assert (peer, peer.name) == (where, host if host == "localhost" else "")


async def test_files_are_read_where_a_sandbox_refuses_memfd_create(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> int:
        raise PermissionError(errno.EPERM, name)

    monkeypatch.setattr("os.memfd_create", refused)
    near, far = authority.config(NEAR, FAR), authority.config(FAR, NEAR)
    async with connected(near=near, far=far, prefer=("tcp",)) as made:
        assert made.left.peer.identity == FAR


async def test_each_side_knows_who_the_other_is(pair: Pair) -> None:
    assert (pair.left.peer.identity, pair.right.peer.identity) == (FAR, NEAR)
    for connection in (pair.left, pair.right):
        assert connection.peer.identity in repr(connection)
        assert connection.peer.trust is TrustMode.MTLS
        assert reasons(connection)["tcp"] == "offered by both sides; inside TLS"
    assert "trust mtls" in repr(pair.near)
    await expect_moves(pair)


async def transfer(pair: Pair, *, pull: bool) -> None:
    """A whole KV transfer from the right side to the left, layer by layer."""
    source, target = (Memory(SPEC, len(BLOCKS)) for _ in range(2))
    source.stamp(BLOCKS)
    if pull:
        out = pair.far.publish("kv", source.cache, BLOCKS)
        inc = pair.left.pull("kv", target.cache, BLOCKS)
    else:
        out = pair.right.push("kv", source.cache, BLOCKS)
        inc = pair.near.expect("kv", target.cache, BLOCKS)
    for layer in range(SPEC.layers):
        out.ready(layers=layer)
        await inc.layer(layer)
    out.finish()
    assert (await inc).complete
    await asyncio.gather(inc.drained(), out.drained())
    assert same(source, BLOCKS, target, BLOCKS, range(SPEC.layers))


@pytest.mark.parametrize("pull", [True, False])
async def test_kv_transfers_over_lanes(pair: Pair, pull: bool) -> None:
    assert len(inside.lanes(pair.left).open) == 1
    await transfer(pair, pull=pull)


async def test_nothing_is_sent_in_the_clear(authority: Authority) -> None:
    """Neither on the control link nor on a lane."""
    heard = bytearray()

    near, far = authority.config(NEAR, FAR), authority.config(FAR, NEAR)
    async with (
        communicators(near | {"name": "canary-name"}, far, prefer=("tcp",)) as (a, b),
        between(await b.listen("127.0.0.1:0"), heard.extend) as address,
    ):
        left = await a.connect(address)
        right = await b.accept()
        canary = b"CANARY of a prompt " * 20_000
        sent = left.send(1, canary)
        assert await right.recv(1) == canary
        await sent
        await left.close()
    assert len(heard) > len(canary)
    for secret in (b"CANARY", b"canary-name", b"kvwire\r\n", NEAR.encode()):
        assert secret not in heard


@contextlib.asynccontextmanager
async def between(
    address: kvwire.Address,
    heard: Callable[[bytes], object],
    contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None),
) -> AsyncIterator[kvwire.Address]:
    """Somebody on the path, who passes everything on; his own address."""

    async def pass_on(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(64 * KIB):
                heard(data)
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(
            address.host, address.port, ssl=contexts[1]
        )
        await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))
        for end in (writer, there[1]):
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=contexts[0])
    yield replace(address, port=server.sockets[0].getsockname()[1])
    await over.wait()
    server.close()


# --- the end --------------------------------------------------------------------------


async def test_a_cancelled_connect_leaves_nothing(authority: Authority) -> None:
    near, far = authority.config(NEAR, FAR), authority.config(FAR, NEAR)
    async with communicators(near, far) as (a, b):
        address = await b.listen("127.0.0.1:0")
        for turns in range(40):
            task = asyncio.create_task(a.connect(address))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()
        await until(lambda: not inside.drivers(a))
        assert not a.live_connections


# --- who may not ----------------------------------------------------------------------


class Refusals:
    """What both sides say about a connection that does not come about."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.INFO, "kvwire")

    async def of(
        self, near: dict[str, Any], far: dict[str, Any], kind: type[Exception]
    ) -> tuple[str, str]:
        """The client's error, and the server's log."""
        self._caplog.clear()
        async with communicators(near, far) as (a, b):
            address = await b.listen("127.0.0.1:0")
            with pytest.raises(kind) as caught:
                await a.connect(address)
            await until(lambda: "refused: " in self._caplog.text)
            assert not a.live_connections
            assert not b.live_connections
        return str(caught.value), self._caplog.text


@pytest.fixture
def refusals(caplog: pytest.LogCaptureFixture) -> Refusals:
    return Refusals(caplog)


async def test_who_may_not(
    authority: Authority, refusals: Refusals, tmp_path: Path
) -> None:
    """Each side says what it has found, and the other that it was refused.

    What else a certificate may lack is in test_tls.
    """
    near, far = authority.config(NEAR, FAR), authority.config(FAR, NEAR)
    stranger = near | Authority(tmp_path).issue(NEAR).config
    untrusted = "no CA in tls_ca_file has signed it"
    refused = "the peer does not accept our tls_cert_file: no CA"
    for mine, theirs, here, there in (
        (
            *(near, authority.config(FAR, OTHER), "does not accept the other's"),
            f"the peer is '{NEAR}', and tls_peers does not list that",
        ),
        (
            *(authority.config(NEAR, OTHER), far),
            f"the peer is '{FAR}', and tls_peers does not list that",
            "does not accept our tls_cert_file: its tls_peers does not name us",
        ),
        (stranger, far, refused, untrusted),
        (near, far | issue(tmp_path, FAR).config, untrusted, refused),
    ):
        client, server = await refusals.of(mine, theirs, AuthenticationFailed)
        assert here in client
        assert there in server


async def test_a_certificate_for_clients_alone_is_not_listened_with(
    authority: Authority,
) -> None:
    usages = (ExtendedKeyUsageOID.CLIENT_AUTH,)
    own, other = authority.config(NEAR, usages=usages), authority.config(FAR)
    async with communicators(own, other) as (near, far):
        with pytest.raises(UsageError, match="only clientAuth"):
            await near.listen("127.0.0.1:0")
        await near.connect(await far.listen("127.0.0.1:0"))


async def test_a_host_that_is_refused_again_and_again_is_one_warning(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = authority.config(NEAR), authority.config(FAR, OTHER)
    caplog.set_level(logging.INFO, "kvwire")
    async with communicators(near, far) as (a, b):
        address = await b.listen("127.0.0.1:0")
        for _ in range(3):
            with pytest.raises(AuthenticationFailed):
                await a.connect(address)
        await until(lambda: caplog.text.count("refused: ") == 3)
    assert len(warned(caplog)) == 1


@pytest.mark.parametrize("mode", ["loopback", "psk"])
@pytest.mark.parametrize("server_is_plain", [True, False])
async def test_one_side_without_tls(
    authority: Authority,
    refusals: Refusals,
    tmp_path: Path,
    mode: str,
    server_is_plain: bool,
) -> None:
    """Both sides say so at once, not when their patience ends."""
    plain: dict[str, Any] = {"trust": mode, "handshake_timeout_s": 60}
    if mode == "psk":
        write_key_file(tmp_path / "key")
        plain["psk_file"] = str(tmp_path / "key")
    inside = authority.config(NEAR) | {"handshake_timeout_s": 60}
    if server_is_plain:
        near, server = await refusals.of(inside, plain, kvwire.AuthenticationFailed)
        assert "the peer speaks no TLS 1.3: is its trust mtls?" in near
        assert 'the peer speaks TLS, as trust "mtls" does' in server
    else:
        near, server = await refusals.of(plain, inside, kvwire.AuthenticationFailed)
        assert 'speaks TLS, as trust "mtls" does, and this side does not' in near
        assert 'the peer speaks no TLS, and trust is "mtls" here' in server


async def test_a_peer_without_an_identity_gets_no_further(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    """Should a link ever prove nothing, the core refuses it on both sides."""
    monkeypatch.setattr(TlsWire, "proven", lambda self: None)
    near, server = await refusals.of(
        authority.config(NEAR), authority.config(FAR), HandshakeError
    )
    assert "this link has no TLS" in server
    assert "no TLS" in near or "certificate" in near


async def test_somebody_between_two_tls_connections(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that both accept passes everything on, and is found out."""
    caplog.set_level(logging.INFO, "kvwire")
    near, far = authority.config(NEAR), authority.config(FAR)
    async with (
        communicators(near, far) as (a, b),
        relay(await b.listen("127.0.0.1:0"), authority) as address,
    ):
        with pytest.raises(AuthenticationFailed, match="ends TLS on the way"):
            await a.connect(address)
        await until(lambda: "ends TLS on the way" in caplog.text)


def relay(
    address: kvwire.Address, authority: Authority
) -> contextlib.AbstractAsyncContextManager[kvwire.Address]:
    """Ends each TLS connection and begins another, with a good certificate."""
    issued = authority.issue(OTHER)
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority.root.cert_file)
        context.load_cert_chain(issued.cert_file, issued.key_file)
        contexts.append(context)
    return between(address, lambda data: None, (contexts[0], contexts[1]))


async def test_a_lane_is_tied_to_its_own_tls_connection(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, for a lane whose secret is right: somebody passes the preamble on."""
    near, far = authority.config(NEAR), authority.config(FAR)
    async with communicators(near | {"lanes": 2}, far, prefer=("tcp",)) as (a, b):
        address = await b.listen("127.0.0.1:0")
        async with relay(address, authority) as elsewhere:
            connect = TcpLane._connect

            async def misled(self: TcpLane) -> tuple[Wire, kvwire.Address]:
                self._context = replace(self._context, remote_address=elsewhere)
                return await connect(self)

            monkeypatch.setattr(TcpLane, "_connect", misled)
            left = await a.connect(address)
            await b.accept()
            assert not inside.lanes(left).open


# --- transports -----------------------------------------------------------------------


async def test_what_would_leave_the_host_in_the_clear_is_not_taken(
    authority: Authority,
) -> None:
    near, far = authority.config(NEAR, FAR), authority.config(FAR, NEAR)
    async with connected(near=near, far=far) as pair:
        for connection in (pair.left, pair.right):
            assert connection.transport in ("tcp", "local")
            assert "not encrypted" in reasons(connection)["ucx"]


async def test_what_is_named_and_leaves_the_host_in_the_clear_is_reported(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "kvwire.driver.lanes.active_transport"
    monkeypatch.setattr(f"{module}.protection", lambda _: "")
    near, far = authority.config(NEAR, FAR), authority.config(FAR, NEAR)
    async with connected(near=near, far=far, prefer=("tcp",)) as pair:
        for connection in (pair.left, pair.right):
            assert reasons(connection)["tcp"].endswith("; NOT ENCRYPTED")


async def test_every_socket_of_a_connection_is_inside_tls(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires: list[Wire] = []
    init = LaneSocket.__init__

    def noted(self: LaneSocket, wire: Wire, *arguments: Any) -> None:
        wires.append(wire)
        init(self, wire, *arguments)

    monkeypatch.setattr(LaneSocket, "__init__", noted)
    near, far = authority.config(NEAR, FAR), authority.config(FAR, NEAR)
    async with connected(near=near, far=far, prefer=("tcp",), lanes=3):
        pass
    assert len(wires) == 4  # both ends of two lanes beside the control link
    assert not any(isinstance(wire, PlainWire) for wire in wires)


async def test_new_connections_use_new_certificates(authority: Authority) -> None:
    """Without a restart; those that are there live on."""
    near, far = authority.config(NEAR), authority.config(FAR)
    async with connected(near=near, far=far, prefer=("tcp",)) as pair:
        new = authority.issue(OTHER).config
        for key, path in new.items():
            os.replace(path, near[key])  # noqa: PTH105 - at once
        again = await pair.near.connect(pair.address)
        seen = await pair.far.accept()
        assert (pair.right.peer.identity, seen.peer.identity) == (NEAR, OTHER)
        await expect_moves(pair)
        await again.close()


def test_a_proved_name_cannot_be_borrowed() -> None:
    """Whoever claims the incarnation of another start of a peer is not that peer."""
    one = PeerInfo(
        name="n",
        incarnation=bytes(16),
        address=None,
        trust=TrustMode.MTLS,
        version=1,
        identity=NEAR,
    )
    assert one.origin == replace(one, name="m").origin
    assert one.origin != replace(one, identity=FAR).origin
    assert one.origin != replace(one, incarnation=bytes(15) + b"1").origin
    plain = replace(one, identity="", trust=TrustMode.PSK)
    assert plain.origin == plain.incarnation
