"""Bounds of a benchmark that a peer serves, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import MIB

# A call and its answer: the report of a doctor is the largest, some 20 KiB a host.
BENCH_CALL_BYTES_MAX: Final = 1 * MIB
# Of one work: 4 GiB in fragments of 4 KiB, which are some 32 MiB of addresses.
BENCH_FRAGMENTS_MAX: Final = 1024 * 1024
BENCH_IN_FLIGHT_MAX: Final = 64
# Connections that are served at a time, each with memory of its own.
BENCH_PEERS_MAX: Final = 8
