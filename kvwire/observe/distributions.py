"""A watcher that adds up distributions of transfers, and counts by peer."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Final

from kvwire import Connection, Incoming, Outcome, Outgoing
from kvwire.errors import printable

# Upper bounds, in steps of at most four: 1 ms to 1 min, and 64 KiB to 16 GiB.
SECONDS: Final = (0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)
BYTES: Final = tuple(float(2**power) for power in range(16, 36, 2))
# The number of peers with their own metrics; all later ones are "other".
PEERS_MAX: Final = 64
OTHER: Final = "other"


class Distribution:
    """Counts values in buckets, like a Prometheus histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds: tuple[float, ...] = bounds
        self.counts: list[int] = [0] * (len(bounds) + 1)
        self.total: float = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Return for each bound the count of values up to it, as Prometheus expects."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class TransferDistributions:
    """Adds up the transfers of one communicator; register it in ``watchers``.

    Attributes:
        exposed: Seconds of each transfer, without waiting for its peer or for the
            producer's compute.
        queue: Seconds that each transfer waited for its peer.
        nbytes: Payload bytes that landed.
        peers: By peer, role and outcome: the number of ended transfers, and of bytes.
    """

    def __init__(self) -> None:
        self.exposed: Distribution = Distribution(SECONDS)
        self.queue: Distribution = Distribution(SECONDS)
        self.nbytes: Distribution = Distribution(BYTES)
        self.peers: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._known: dict[str, None] = {}

    def begun(self, transfer: Incoming | Outgoing) -> None:
        """Do nothing: transfers are counted at their end."""

    def ended(
        self,
        transfer: Incoming | Outgoing,
        outcome: Outcome,
        connections: tuple[Connection, ...],
    ) -> None:
        """Add a transfer to the distributions."""
        times = outcome.timings
        queue_s = times.queue_s + times.memory_wait_s
        self.queue.add(queue_s)
        self.exposed.add(max(0.0, times.total_s - queue_s - times.mark_wait_s))
        self.nbytes.add(outcome.nbytes)
        role = "consumer" if isinstance(transfer, Incoming) else "producer"
        for connection in connections:
            name = printable(connection.peer.name)
            if name not in self._known and len(self._known) >= PEERS_MAX:
                name = OTHER
            self._known[name] = None  # bounded: PEERS_MAX and one
            key = name, role, outcome.state
            ends, nbytes = self.peers.get(key, (0, 0))
            self.peers[key] = ends + 1, nbytes + outcome.nbytes
