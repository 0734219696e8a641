"""Bounds for observing processes, each with its reason."""

from __future__ import annotations

from typing import Final

# The largest answer to an inspector: several times a large snapshot or trace.
INSPECT_ANSWER_BYTES_MAX: Final = 64 << 20
# An HTTP server's connections at once, each with a thread: a few scrapers, probes and
# people. Further connections are closed.
HTTP_CONNECTIONS_MAX: Final = 16
