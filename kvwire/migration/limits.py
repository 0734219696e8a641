"""Bounds of migrations, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import MIB

# An engine's state for a request besides its KV: a million tokens of 4 bytes.
MIGRATION_STATE_BYTES_MAX: Final = 4 * MIB
# Rounds of copying while the request continues. A round takes a fraction of the one
# before, so four leave a block or less, unless the wire is slower than the engine.
MIGRATION_ROUNDS: Final = 8
MIGRATION_ROUNDS_MAX: Final = 64
# Requests that arrive over one connection at once; each may hold blocks of the engine.
MIGRATIONS_MAX: Final = 256
# A prompt of 10 GB takes 10 s at 1 GB/s.
MIGRATION_TIMEOUT_S: Final = 30.0
