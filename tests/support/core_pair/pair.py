"""Two protocol cores joined in memory, in virtual time.

For tests that want a whole connection and neither sockets nor an event loop::

    pair = ConnectionPair()
    received = pair.server.recv(7)
    pair.client.send(7, b"hello")
    pair.run()
    assert pair.server.received(received) == b"hello"

Nothing moves by itself. :meth:`ConnectionPair.run` delivers frames until none is left,
:meth:`ConnectionPair.advance` lets time pass, and each end (a
:class:`~tests.support.core_pair.peer.Peer`) can be told to stall, to be slow, or to
receive a frame that was made by hand.
"""

from __future__ import annotations

from kvwire.proto.agreement import Identity
from kvwire.types import Role, TrustMode
from tests.support.core_pair.handshakes import Shaking, begin, identity, shake
from tests.support.core_pair.peer import Peer

# More than any test needs, and few enough to end soon where two cores never agree.
_FRAMES_MAX = 100_000


class ConnectionPair:
    """Both ends of one connection, after a real handshake."""

    def __init__(
        self,
        *,
        trust: TrustMode = TrustMode.LOOPBACK,
        client: Identity | None = None,
        server: Identity | None = None,
        shaken: Shaking | None = None,
        now: float = 1000.0,
    ) -> None:
        """Shake hands."""
        if shaken is None:
            mine = client or identity("client", trust=trust)
            theirs = server or identity("server", trust=trust)
            shaken = shake(begin(mine, theirs))
        self.now = now
        self.client, self.server = (
            Peer(shaken.of(role), parameters=shaken.parameters(role), now=now)
            for role in Role
        )

    def of(self, role: Role) -> Peer:
        """The end with a role."""
        return self.client if role is Role.CLIENT else self.server

    def deliver(self, sender: Peer) -> bool:
        """Deliver the oldest frame of one end; False if there is none."""
        if not sender.wire:
            return False
        self._other(sender).receive(sender.wire.popleft())
        return True

    def run(self) -> None:
        """Deliver frames, in turns, until there are none; then end what has ended."""
        for _ in range(_FRAMES_MAX):
            delivered = self.deliver(self.client) | self.deliver(self.server)
            if self._cut() or delivered:
                continue
            return
        raise AssertionError("the two ends do not come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass, with all that it brings."""
        until = self.now + seconds
        while (due := self._next_tick()) is not None and due <= until:
            self._set_clock(max(self.now, due))
            for end in (self.client, self.server):
                if not end.core.closed and end.core.next_tick <= self.now:
                    end.tick()
            self.run()
        self._set_clock(until)

    def _next_tick(self) -> float | None:
        open_ends = [e for e in (self.client, self.server) if not e.core.closed]
        return min((end.core.next_tick for end in open_ends), default=None)

    def _set_clock(self, now: float) -> None:
        self.now = self.client.now = self.server.now = now

    def _cut(self) -> bool:
        """Once an end is over, and what it still had to say is said, cut the wire."""
        for end in (self.client, self.server):
            over = end.ended
            if over is None or (over.graceful and end.wire):
                continue
            other = self._other(end)
            if not end.lost:
                end.lose()
                if not other.lost:
                    other.lose()
                return True
        return False

    def _other(self, end: Peer) -> Peer:
        return self.server if end is self.client else self.client
