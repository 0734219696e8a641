"""Bounds of peers, listeners and inspection, each with its reason."""

from __future__ import annotations

from typing import Final

# Handshakes that may be pending on one listener. At 32 KiB each
# (tests/fault/test_strangers.py), strangers pin at most 8 MiB together.
PENDING_HANDSHAKES_MAX: Final = 256
# Peers that one communicator knows by name; each may hold a connection.
PEERS_MAX: Final = 4096
# Members that are tried in one round, and the longest pause between two rounds. So a
# directory full of forged records costs 16 attempts a second and no more.
PEER_ATTEMPTS_MAX: Final = 16
PEER_REDIAL_S_MAX: Final = 1.0
# How often a host refused for its key is a WARNING; refusals in between are INFO.
REFUSED_LOG_S: Final = 60.0
REFUSED_HOSTS_MAX: Final = 256
# Those who watch one process at a time, and what they may ask in a line.
INSPECT_CLIENTS_MAX: Final = 8
INSPECT_LINE_BYTES_MAX: Final = 4096
# Redialling after a lost connection: the first try at once, then doubling with jitter.
REDIAL_S: Final = 0.05
REDIAL_S_MAX: Final = 0.5
