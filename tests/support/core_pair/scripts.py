"""Small conversations between the two ends of a pair, each shown in a transcript.

A script is a generator: it does something, and with each ``yield`` says what it has
done. What it did then travels until nothing is left, and the script goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from kvwire.errors import RequestCancelled, WireCode
from kvwire.memory.checksum import checksum
from kvwire.proto.connection import LAST_FIN_DELAY_S
from kvwire.proto.events import (
    Event,
    TransferOpened,
    WindowAsked,
    WindowRead,
    WindowReadTogether,
)
from kvwire.proto.records import RequestRecord, TransferRecord
from kvwire.types import Role
from kvwire.wire.control import (
    AccessBody,
    WindowGet,
    WindowMemoryBody,
    WindowOpened,
    WindowViewBody,
)
from tests.support.core_pair.pair_lanes import PairLanes
from tests.support.core_pair.peer import ConnectionPair, Peer

E = TypeVar("E", bound=Event)
Script = Callable[[ConnectionPair], Iterator[str]]

TAG: Final = 7
_SMALL: Final = b"travels at once"
_LARGE: Final = bytes(range(100))
_BOX: Final = (0, 0, 1, 0, 1)


def messages(pair: ConnectionPair) -> Iterator[str]:
    """At once: into memory that is there, held, of 0 bytes; and credit for them."""
    client, server = pair.client, pair.server
    server.recv(TAG, 100)
    client.send(TAG, _SMALL)
    yield "the client sends 15 bytes to a receive that was posted"
    client.send(TAG, _SMALL)
    yield "and again, to nobody"
    server.recv(TAG, None)
    yield "the server receives what was held"
    server.send(2**64 - 1, b"")
    client.recv(2**64 - 1, 0)
    yield "the server sends 0 bytes with the largest tag"
    for _ in range(4):
        client.send(TAG, b"x")
        server.recv(TAG, 1)
    yield "four more, for which credit comes back"


def rendezvous(pair: ConnectionPair) -> Iterator[str]:
    """Announced: before and after the receive, too large for it, taken back."""
    client, server = pair.client, pair.server
    server.recv(TAG, 100)
    client.send(TAG, _LARGE)
    yield "the client sends 100 bytes to a receive that was posted"
    server.send(TAG, _LARGE)
    yield "the server announces 100 bytes to nobody"
    client.recv(TAG, 99)
    yield "a receive of 99 bytes fails"
    client.recv(TAG, 100)
    yield "one of 100 takes them"
    sent = client.send(TAG, _LARGE)
    assert sent is not None
    yield "the client announces 100 bytes"
    client.cancel(sent)
    yield "and takes them back"


def puts_and_gets(pair: ConnectionPair) -> Iterator[str]:
    """Whole grants and parts of them, in both directions."""
    client, server = pair.client, pair.server
    region = server.expose(_LARGE)
    grant = server.grant(region, 10, 50)
    client.put(b"y" * 50, grant)
    yield "the client puts 50 bytes at 10"
    client.get(grant)
    yield "and gets them back"
    mine = client.grant(client.expose(_LARGE))
    server.get(mine)
    server.put(_LARGE, mine)
    yield "the server gets and puts at once"


def refused(pair: ConnectionPair) -> Iterator[str]:
    """Requests that fail while the connection goes on."""
    client, server = pair.client, pair.server
    region = server.expose(_LARGE)
    grant = server.grant(region)
    other = server.expose(_LARGE)
    server.stalled = True
    got = client.get(server.grant(other))
    yield "the client gets, and the server's wire is stuck"
    client.cancel(got)
    yield "the client cancels it"
    client.get(server.grant(other), deadline=pair.now + 1.0)
    yield "the client gets with a deadline"
    _wait(client, 1.0)
    yield "which passes"
    server.revoke(region)
    client.put(_LARGE, grant)
    yield "the client puts into a region that was revoked"
    client.get(_forged(grant))
    yield "and gets with a token that nobody has made"


def alive(pair: ConnectionPair) -> Iterator[str]:
    """A quiet hour, or a part of it."""
    _wait(pair.client, 2.0)
    yield "the client has heard nothing for two seconds"
    for _ in range(3):
        _wait(pair.server, 2.0)
    yield "the server hears nothing for longer"


def pushed(pair: ConnectionPair) -> Iterator[str]:
    """A KV transfer that the producer asks for; one segment comes twice as large."""
    client, server = pair.client, pair.server
    out = _ask(client, pull=False)
    yield "the client offers a transfer"
    _answer(server)
    yield "the server agrees"
    for data in (_LARGE, _LARGE * 2):
        _mark(client, out, data)
        client.collect()
    yield "the client marks two segments"
    _wait(server, LAST_FIN_DELAY_S)
    yield "the server acknowledges them"
    client.core.transfers.commit(out, complete=True)
    client.collect()
    yield "the client commits"
    _wait(client, LAST_FIN_DELAY_S)
    yield "and confirms"


def pulled(pair: ConnectionPair) -> Iterator[str]:
    """The same, asked for by the consumer; and one that is refused."""
    client, server = pair.client, pair.server
    _ask(client, pull=True)
    yield "the client asks for a transfer"
    out = _answer(server)
    _mark(server, out, _LARGE)
    server.core.transfers.commit(out, complete=False)
    server.collect()
    yield "the server agrees, marks a segment and commits"
    _ask(client, pull=True)
    yield "the client asks for another"
    opened = _opened(server)
    error = RequestCancelled("nothing of that name")
    server.core.refuse(opened, error, WireCode.CANCELLED)
    server.collect()
    yield "the server refuses"


def on_lanes(pair: ConnectionPair) -> Iterator[str]:
    """A lane that carries both ways and breaks, one that is declined, and no more."""
    client, server, lanes = pair.client, pair.server, PairLanes(pair)
    number = lanes.ask()
    yield "the client asks for a lane"
    lanes.via = dict.fromkeys(Role, number)
    grant = server.grant(server.expose(_LARGE))
    client.put(_LARGE, grant)
    client.get(grant)
    yield "the client puts and gets 100 bytes"
    for role in Role:
        half = lanes.halves[role, number]
        lanes.move(half, *half.arriving)
        half = lanes.halves[role.other, number]
        lanes.sent(half, *half.sending)
    yield "the payloads move"
    client.put(_LARGE, grant)
    yield "the client puts again"
    lanes.end(lanes.halves[Role.SERVER, number], "broken")
    yield "the server's half breaks before that has moved"
    lanes.end(lanes.halves[Role.CLIENT, number], "the other half is gone")
    yield "the client's half follows, and what was missed goes over the wire"
    lanes.refuses = True
    number = lanes.ask()
    yield "the client asks for another lane"
    lanes.end(lanes.halves[Role.CLIENT, number], "declined")
    client.core.lanes.end_initial_set()
    client.collect()
    yield "and is content without"


def windows(pair: ConnectionPair) -> Iterator[str]:
    """Gets of a window: of a block that is there, of one withdrawn, of a small one."""
    client, server = pair.client, pair.server
    client.core.open_window("kv", None)
    client.collect()
    yield "the client opens a window"
    number = server.core.windows.number()
    answer = WindowOpened(number, bytes(range(16)), b"geometry")
    server.core.windows.answer(_last(server, WindowAsked).wire_id, answer)
    server.collect()
    yield "the server answers with its number"
    memory = WindowMemoryBody(number, 3, b"addresses", b"key")
    server.core.windows.report(memory)
    server.collect()
    yield "a lane of the server can read it in place"
    client.core.windows.report(WindowViewBody(number, 5, b"mine"))
    client.collect()
    yield "the client reports where blocks are to land"
    _read(client, number)
    yield "and asks for a block"
    request = _last(server, WindowRead).request
    server.core.windows.serve(request, server.lend(_LARGE))
    server.collect()
    server.core.windows.finish(request, b"", sent=True)
    server.collect()
    yield "the server sends it"
    _read(client, number)
    yield "the client asks again"
    request = _last(server, WindowRead).request
    server.core.windows.finish(request, b"\1", sent=False)
    server.collect()
    yield "the block was withdrawn"
    entries, generations = (17).to_bytes(4, "little"), bytes(range(8))
    body = WindowGet(number, 5, len(_SMALL), (1,), entries, generations, together=True)
    client.core.read_window(None, body, None)
    client.collect()
    yield "the client asks for a small block"
    wire_id = _last(server, WindowReadTogether).wire_id
    data = memoryview(_SMALL)
    server.send_data(wire_id, data, checksum(data))
    yield "which comes at once"
    server.core.windows.hide(number)
    server.collect()
    yield "the server ends the window"
    client.core.windows.close(number)
    client.collect()
    yield "the client no longer reads it"


def closed(pair: ConnectionPair) -> Iterator[str]:
    """A close that waits for a put, and for nothing else."""
    client, server = pair.client, pair.server
    client.recv(TAG, 10)
    client.put(_LARGE, server.grant(server.expose(100)))
    client.close()
    yield "the client puts and closes"


def closed_by_both(pair: ConnectionPair) -> Iterator[str]:
    """Two CLOSE that cross."""
    pair.client.close()
    pair.server.close()
    yield "both close"


SCRIPTS: Final[dict[str, Script]] = {
    script.__name__.replace("_", "-"): script
    for script in (
        *(messages, rendezvous, puts_and_gets, refused, alive),
        *(pushed, pulled, on_lanes, windows, closed, closed_by_both),
    )
}


def _wait(peer: Peer, seconds: float) -> None:
    """Let time pass at one end."""
    peer.now += seconds
    peer.tick()


def _forged(grant: AccessBody) -> AccessBody:
    return AccessBody(grant.grant, grant.generation, bytes(16), 0, 1)


def _ask(peer: Peer, *, pull: bool) -> RequestRecord:
    transfer = TransferRecord(id=b"request 17", priority=1)
    request = peer.core.open_transfer(transfer, b"mine", pull=pull, deadline=None)
    peer.collect()
    return request


def _read(peer: Peer, window: int) -> None:
    entries, generations = (17).to_bytes(4, "little"), bytes(range(8))
    body = WindowGet(window, 5, len(_LARGE), (1,), entries, generations)
    peer.core.read_window(peer.lend(body.nbytes), body, None)
    peer.collect()


def _last(peer: Peer, kind: type[E]) -> E:
    return [event for event in peer.events if isinstance(event, kind)][-1]


def _opened(peer: Peer) -> RequestRecord:
    return _last(peer, TransferOpened).request


def _mark(peer: Peer, out: RequestRecord, data: bytes) -> None:
    transfers = peer.core.transfers
    transfers.queue(transfers.mark(out, _BOX, len(data)), peer.lend(data))


def _answer(peer: Peer) -> RequestRecord:
    request = _opened(peer)
    peer.core.transfers.agree(request, b"yours")
    peer.collect()
    return request
