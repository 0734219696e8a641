"""Counts of a communicator's operations since it was opened.

They are plain attributes, so counting costs one addition. Exporters (Prometheus,
OpenTelemetry, a log line) in :mod:`kvwire.observe` read them at any time.
"""

from __future__ import annotations

import msgspec

from kvwire.kv.outcome import Outcome


class Counters(msgspec.Struct):
    """Counts since the communicator was opened.

    Attributes:
        connections: Connections made, by either side.
        connections_lost: Connections that ended without a close.
        lanes_raised: Lanes that were opened.
        lanes_failed: Lanes that could not be opened, or broke.
        lanes_restored: Lanes that were opened to replace a broken one.
        transport_fallbacks: How often data had to use another transport than the
            preferred one, from the start or because it broke.
        transfers_complete: Outcomes of KV transfers, in either role, with all blocks.
        transfers_partial: Outcomes with some blocks.
        transfers_failed: Outcomes with no block.
        sent_bytes: KV bytes that consumers have acknowledged.
        received_bytes: KV bytes that have landed here and were verified.
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
        """Count the outcome of a KV transfer, as its receiver or sender."""
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
