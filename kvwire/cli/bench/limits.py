"""Bounds of a benchmark that a peer serves, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import MIB

# A call and its answer: the largest is a doctor's report, about 20 KiB per host.
BENCH_CALL_BYTES_MAX: Final = 1 * MIB
# Fragments of one work: 4 GiB in fragments of 4 KiB, whose addresses take about 32 MiB.
BENCH_FRAGMENTS_MAX: Final = 1024 * 1024
BENCH_IN_FLIGHT_MAX: Final = 64
# Connections that are served at once, each with its own memory.
BENCH_PEERS_MAX: Final = 8
