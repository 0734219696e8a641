"""What was recorded still means the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from kvwire.errors import RequestCancelled, WireCode
from kvwire.memory.checksum import checksum
from kvwire.proto.connection import LAST_FIN_DELAY_S
from kvwire.proto.events import (
    TransferOpened,
    WindowAsked,
    WindowRead,
    WindowReadTogether,
)
from kvwire.proto.framing import Framing
from kvwire.proto.records import RequestRecord
from kvwire.types import Role, TrustMode
from kvwire.wire.control import (
    AccessBody,
    Fail,
    WindowGet,
    WindowMemoryBody,
    WindowOpened,
    WindowViewBody,
    encode_body,
)
from kvwire.wire.header import FrameType
from tests.support.core_pair.handshakes import identity
from tests.support.core_pair.pair_lanes import PairLanes
from tests.support.core_pair.peer import ConnectionPair, Peer
from tests.support.core_pair.transcripts import Case, Script, record, written

GOLDEN = Path(__file__).with_name("golden")
# After a change that is meant: python -m tests.support.core_pair.test_transcripts DIR
CHANGED = "protocol version 1 is what these bytes say; another meaning is a new version"

TAG: Final = 7
_SMALL: Final = b"travels at once"
_LARGE: Final = bytes(range(100))
# Frames are sealed with a key; where they are not, a mark may travel with its data.
_TRUST: Final = {"pushed": TrustMode.LOOPBACK, "messages": TrustMode.MTLS}
_PSK, _OTHER = TrustMode.PSK, bytes(range(1, 33))
REFUSED: Final = [
    Case(
        name="refused-version",
        client=identity("client"),
        server=identity("server", versions=(2, 3)),
    ),
    Case(
        name="refused-trust",
        client=identity("client"),
        server=identity("server", trust=_PSK),
    ),
    Case(
        name="refused-key",
        client=identity("client", trust=_PSK),
        server=identity("server", trust=_PSK, psk=_OTHER),
    ),
    Case(
        name="refused-profile",
        client=identity("client", trust=_PSK, profile=(("model", "a"),)),
        server=identity("server", trust=_PSK, profile=(("model", "b"),)),
    ),
]
CASES: Final = [*REFUSED]


def expect_same(case: Case) -> None:
    golden = (GOLDEN / f"{case.name}.txt").read_text()
    assert record(case) == golden, CHANGED


def expect_recorded(script: Script) -> Callable[[], None]:
    """Make a test of a script: it has not changed since it was recorded (goal R6)."""
    name = script.__name__.removeprefix("test_").replace("_", "-")
    trust = _TRUST.get(name, TrustMode.PSK)
    case = Case(
        name=f"{name}-{trust.name.lower()}",
        client=identity("client", trust=trust),
        server=identity("server", trust=trust),
        script=script,
    )
    CASES.append(case)

    def test() -> None:
        expect_same(case)

    test.__name__, test.__doc__ = script.__name__, script.__doc__
    return test


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_handshake_that_is_refused(case: Case) -> None:
    expect_same(case)


@expect_recorded
def test_messages(pair: ConnectionPair) -> Iterator[str]:
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


@expect_recorded
def test_rendezvous(pair: ConnectionPair) -> Iterator[str]:
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


@expect_recorded
def test_puts_and_gets(pair: ConnectionPair) -> Iterator[str]:
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


@expect_recorded
def test_refused(pair: ConnectionPair) -> Iterator[str]:
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


@expect_recorded
def test_alive(pair: ConnectionPair) -> Iterator[str]:
    """A quiet hour, or a part of it."""
    _wait(pair.client, 2.0)
    yield "the client has heard nothing for two seconds"
    for _ in range(3):
        _wait(pair.server, 2.0)
    yield "the server hears nothing for longer"


@expect_recorded
def test_pushed(pair: ConnectionPair) -> Iterator[str]:
    """A KV transfer that the producer asks for; one segment comes twice as large."""
    client, server = pair.client, pair.server
    out = _ask(client, pull=False)
    yield "the client offers a transfer"
    server.agree(b"yours")
    yield "the server agrees"
    for data in (_LARGE, _LARGE * 2):
        client.mark(out, data)
    yield "the client marks two segments"
    _wait(server, LAST_FIN_DELAY_S)
    yield "the server acknowledges them"
    client.commit(out)
    yield "the client commits"
    _wait(client, LAST_FIN_DELAY_S)
    yield "and confirms"


@expect_recorded
def test_pulled(pair: ConnectionPair) -> Iterator[str]:
    """The same, asked for by the consumer; and one that is refused."""
    client, server = pair.client, pair.server
    _ask(client, pull=True)
    yield "the client asks for a transfer"
    out = server.agree(b"yours")
    server.stalled = True
    server.mark(out, _LARGE)
    server.commit(out, complete=False)
    server.stalled = False
    yield "the server agrees, marks a segment and commits"
    _ask(client, pull=True)
    yield "the client asks for another"
    opened = server.heard(TransferOpened)[-1].request
    error = RequestCancelled("nothing of that name")
    server.core.refuse(opened, error, WireCode.CANCELLED)
    yield "the server refuses"


@expect_recorded
def test_on_lanes(pair: ConnectionPair) -> Iterator[str]:
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
    yield "and is content without"


@expect_recorded
def test_windows(pair: ConnectionPair) -> Iterator[str]:
    """Gets of a window: of a block that is there, of one withdrawn, of a small one."""
    client, server = pair.client, pair.server
    client.core.open_window("kv", None)
    yield "the client opens a window"
    number = server.core.windows.number()
    answer = WindowOpened(number, bytes(range(16)), b"geometry")
    server.core.windows.answer(server.heard(WindowAsked)[-1].wire_id, answer)
    yield "the server answers with its number"
    memory = WindowMemoryBody(number, 3, b"addresses", b"key")
    server.core.windows.report(memory)
    yield "a lane of the server can read it in place"
    client.core.windows.report(WindowViewBody(number, 5, b"mine"))
    yield "the client reports where blocks are to land"
    _read(client, number)
    yield "and asks for a block"
    request = server.heard(WindowRead)[-1].request
    server.core.windows.serve(request, server.lend(_LARGE))
    server.collect()
    server.core.windows.finish(request, b"", sent=True)
    yield "the server sends it"
    _read(client, number)
    yield "the client asks again"
    request = server.heard(WindowRead)[-1].request
    server.core.windows.finish(request, b"\1", sent=False)
    yield "the block was withdrawn"
    entries, generations = (17).to_bytes(4, "little"), bytes(range(8))
    body = WindowGet(number, 5, len(_SMALL), (1,), entries, generations, together=True)
    client.core.read_window(None, body, None)
    yield "the client asks for a small block"
    wire_id = server.heard(WindowReadTogether)[-1].wire_id
    data = memoryview(_SMALL)
    server.send_data(wire_id, data, checksum(data))
    yield "which comes at once"
    server.core.windows.hide(number)
    yield "the server ends the window"
    client.core.windows.close(number)
    yield "the client no longer reads it"


@expect_recorded
def test_closed(pair: ConnectionPair) -> Iterator[str]:
    """A close that waits for a put, and for nothing else."""
    client, server = pair.client, pair.server
    client.recv(TAG, 10)
    client.put(_LARGE, server.grant(server.expose(100)))
    client.close()
    yield "the client puts and closes"


@expect_recorded
def test_closed_by_both(pair: ConnectionPair) -> Iterator[str]:
    """Two CLOSE that cross."""
    pair.client.close()
    pair.server.close()
    yield "both close"


def write(directory: Path) -> None:
    """Write every transcript of this version."""
    directory.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        (directory / f"{case.name}.txt").write_text(str(record(case)))


def test_every_file_is_a_case_and_every_case_a_file() -> None:
    """None is forgotten when it is renamed."""
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(
        case.name for case in CASES
    )


def test_every_frame_type_is_recorded() -> None:
    lines = [one for case in CASES for one in record(case).splitlines()]
    found = {int(line[2:4], 16) for line in lines if line[0] in "<>"}
    assert found == set(FrameType)


def test_the_wording_of_a_failure_is_free() -> None:
    def failure(code: int, text: str) -> str:
        body = encode_body(Fail(code, text))
        frame = Framing().control(FrameType.FAIL, body, request=1)
        return written(Role.CLIENT, frame)

    assert failure(33, "one text") == failure(33, "and another")
    assert failure(33, "one text") != failure(34, "one text")


# --- what ends of a script do -----


def _wait(peer: Peer, seconds: float) -> None:
    """Let time pass at one end."""
    peer.now += seconds
    peer.tick()


def _forged(grant: AccessBody) -> AccessBody:
    return AccessBody(grant.grant, grant.generation, bytes(16), 0, 1)


def _ask(peer: Peer, *, pull: bool) -> RequestRecord:
    return peer.open(pull=pull, name=b"request 17", description=b"mine", priority=1)


def _read(peer: Peer, window: int) -> None:
    entries, generations = (17).to_bytes(4, "little"), bytes(range(8))
    peer.read(WindowGet(window, 5, len(_LARGE), (1,), entries, generations))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
