"""Bounds of peers, listeners and inspection, each with its reason."""

from __future__ import annotations

from typing import Final

# The most pending handshakes on one listener. At 32 KiB each
# (tests/fault/test_strangers.py), unknown peers occupy at most 8 MiB together.
PENDING_HANDSHAKES_MAX: Final = 256
# The most peers that one communicator knows by name; each may have a connection.
PEERS_MAX: Final = 4096
# The most members tried in one round, and the longest pause between two rounds. So a
# directory full of forged records costs at most 16 attempts a second.
PEER_ATTEMPTS_MAX: Final = 16
PEER_REDIAL_S_MAX: Final = 1.0
# How often refusing a host for its key is logged as a WARNING; refusals in between are
# INFO.
REFUSED_LOG_S: Final = 60.0
REFUSED_HOSTS_MAX: Final = 256
# The most clients that watch a process at a time, and the longest line of a request.
INSPECT_CLIENTS_MAX: Final = 8
INSPECT_LINE_BYTES_MAX: Final = 4096
# Pauses between redials after a lost connection: none at first, then doubling with
# jitter.
REDIAL_S: Final = 0.05
REDIAL_S_MAX: Final = 0.5
