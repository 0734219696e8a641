"""What goes wrong in a benchmark itself."""

from __future__ import annotations

from kvwire import KVWireError


class BenchError(KVWireError):
    """A benchmark could not be run, or its bytes did not arrive as they were sent."""
