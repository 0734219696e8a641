"""Live migration: a running request moves to another engine with a short pause.

The source engine copies the request's full blocks in rounds while the request runs,
until little is left. Then it pauses the request after a step, copies the rest, and
hands the request over with the engine's own state for it. KV is only ever appended, so
no block is copied twice::

    moved = await migrate(connection, request)          # on the source engine

    target = MigrationTarget(                           # on the target engine
        comm, pool.cache, take=pool.take, give_back=pool.give_back, start=engine.start
    )
    await target.serve(connection)                      # for each connection

Until the handover the request belongs to the source: if anything fails, it continues
there and has lost only the pause. After the handover it belongs to the target, and the
source frees its blocks once they have drained. No token is computed twice: the target
starts only after the handover, and the source never continues after it.

An engine that dies loses its requests, with or without migration. The server that holds
the stream to the client can number the tokens, and request the rest from another
engine; ``examples/migrate.py`` does so.
"""

from kvwire.migration.source import (
    Migration,
    RunningRequest,
    Written,
    migrate,
)
from kvwire.migration.target import Arrival, MigrationTarget

__all__ = [
    "Arrival",
    "Migration",
    "MigrationTarget",
    "RunningRequest",
    "Written",
    "migrate",
]
