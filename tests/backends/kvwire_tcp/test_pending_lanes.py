"""A lane's socket goes to the lane that waits for it; a stranger's is reset."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvwire.errors import BackendUnavailable
from kvwire.limits import CONNECTIONS_MAX
from kvwire.types import Address
from kvwire_tcp.pending_lanes import PendingLane, PendingLanes
from kvwire_tcp.preamble import is_proof, make_preamble, token_of
from kvwire_tcp.wire import PlainWire, Wire
from tests.support.sockets import tcp_sockets

REMOTE = Address("tcp", "192.0.2.7", 40000)
SECRET, OTHER = bytes(32), bytes(range(32))
PREAMBLE = make_preamble(SECRET, 1, bytes(32))


class Lane(PendingLane):
    """Waits for the socket of one lane, and keeps it."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.secret = secret
        self.came: list[tuple[socket.socket, Address, bytes]] = []

    def admits(self, wire: Wire, preamble: bytes) -> bool:
        return is_proof(preamble, self.secret, 1)

    def arrived(self, wire: Wire, remote: Address, preamble: bytes) -> None:
        self.came.append((wire.sock, remote, preamble))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one TCP connection: the listener's and the stranger's."""
    far, near = tcp_sockets()
    with near, far:
        yield near, far


def waiting(secret: bytes = SECRET) -> tuple[PendingLanes, Lane]:
    """Make pending lanes, and a lane that waits there."""
    pending_lanes, lane = PendingLanes(), Lane(secret)
    pending_lanes.expect(token_of(secret), lane)
    return pending_lanes, lane


def expect_reset(near: socket.socket, far: socket.socket) -> None:
    """Closed here, and the other end knows at once and has read nothing."""
    assert near.fileno() == -1
    with pytest.raises(ConnectionResetError):
        far.recv(1)


def test_a_preamble_that_is_said_again_is_worth_nothing(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    pending_lanes, lane = waiting()
    with socket.socket() as proper:
        pending_lanes.claim_socket(PlainWire(proper), REMOTE, PREAMBLE)
        pending_lanes.claim_socket(PlainWire(ends[0]), REMOTE, PREAMBLE)
        assert len(lane.came) == 1
    expect_reset(*ends)


def test_a_socket_that_is_gone_already_is_no_error() -> None:
    gone = socket.socket()
    gone.close()
    PendingLanes().claim_socket(PlainWire(gone), REMOTE, PREAMBLE)
    assert gone.fileno() == -1


def test_so_many_lanes_may_wait_and_no_more() -> None:
    pending_lanes, lane = PendingLanes(), Lane()
    for number in range(CONNECTIONS_MAX):
        pending_lanes.expect(number.to_bytes(16, "big"), lane)
    with pytest.raises(BackendUnavailable, match=f"{CONNECTIONS_MAX} lanes wait"):
        pending_lanes.expect(b"one more than all", lane)
    pending_lanes.forget(bytes(16))
    pending_lanes.expect(b"in the free place", lane)
