"""Live migration: a running request goes to another engine, and hardly pauses.

The engine that has the request copies the blocks that are full while the request goes
on, round by round, until little is left. Then it pauses the request behind a step,
copies the rest, and hands the request over with what the engine says of it. KV is only
ever appended, so no block is copied twice::

    moved = await migrate(connection, request)          # where the request runs

    target = MigrationTarget(                           # where it goes
        comm, pool.cache, take=pool.take, give_back=pool.give_back, start=engine.start
    )
    await target.serve(connection)                      # for each connection

Until the handover the request is the source's: whatever fails, it goes on there, and it
has lost nothing but the pause. With the handover it is the target's. The source frees
its blocks once they have drained. No token is computed by both: the target starts
behind the handover, and the source never goes on after it.

One engine's death costs the requests it has, as it does without migration. Who holds
the stream to the client numbers its tokens, and asks another engine for the rest:
``examples/migrate.py`` does so.
"""

from kvwire.integrations.migration.source import (
    Migration,
    RunningRequest,
    Written,
    migrate,
)
from kvwire.integrations.migration.target import Arrival, MigrationTarget

__all__ = [
    "Arrival",
    "Migration",
    "MigrationTarget",
    "RunningRequest",
    "Written",
    "migrate",
]
