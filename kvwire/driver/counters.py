"""Counts of a communicator's operations since it was opened.

They are plain attributes: counting costs one addition, and exporters (Prometheus,
OpenTelemetry, a log line) read them at any time. :mod:`kvwire.observe` does that.
"""

from __future__ import annotations

import msgspec

from kvwire.kv.outcome import Outcome


class Counters(msgspec.Struct):
    """Counts since the communicator was opened.

    Attributes:
        connections: Connections made, by either side.
        connections_lost: Connections that ended without a close.
        lanes_raised: Lanes that came up.
        lanes_failed: Lanes that did not come up, or broke.
        lanes_restored: Lanes that came up in place of a broken one.
        transport_fallbacks: Times that data had to move to another transport than the
            preferred one: at the start, or because it broke.
        transfers_complete: Ends of KV transfers, of both roles, with all blocks.
        transfers_partial: The same with some blocks.
        transfers_failed: The same with no block.
        sent_bytes: KV bytes that consumers have acknowledged.
        received_bytes: KV bytes that have landed here, verified.
    """

    connections: int = 0
    connections_lost: int = 0
    lanes_raised: int = 0
    lanes_failed: int = 0
    lanes_restored: int = 0
    transport_fallbacks: int = 0
    transfers_complete: int = 0
    transfers_partial: int = 0
    transfers_failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def transfer_ended(self, outcome: Outcome, *, received: bool) -> None:
        """Count an end of a KV transfer, on the side that received or sent it."""
        if outcome.complete:
            self.transfers_complete += 1
        elif outcome.state == "partial":
            self.transfers_partial += 1
        else:
            self.transfers_failed += 1
        if received:
            self.received_bytes += outcome.nbytes
        else:
            self.sent_bytes += outcome.nbytes
