"""Bounds of what observes processes, each with its reason."""

from __future__ import annotations

from typing import Final

# What a process answers to its inspector: a snapshot or a trace, several times over.
INSPECT_ANSWER_BYTES_MAX: Final = 64 << 20
# Connections of an HTTP server at once, a thread each: a few scrapers, probes and
# people. Others are closed.
HTTP_CONNECTIONS_MAX: Final = 16
