"""Ray as a directory: one named actor, for fleets that run no other server.

``ray:fleet`` is the detached actor ``fleet`` in the namespace ``kvwire`` of the Ray
cluster that this process is connected to; the first process that needs the actor
creates it. The actor holds a table in memory and counts leases by its own clock. If its
node is lost, Ray restarts the actor with an empty table, which renewals fill again
within a third of a lease. A follower's call waits for the next change, so changes
arrive at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, Final

from kvwire.directory.base import Batch, Directory
from kvwire.directory.limits import MEMBERS_MAX, RECORD_BYTES_MAX
from kvwire.errors import ConnectError, UsageError
from kvwire.extras import needed_by

with needed_by("a directory on Ray", extra="ray"):
    import ray
    from ray.exceptions import RayError

NAMESPACE: Final = "kvwire"

# If a call gets no answer within this time, the follower counts the actor as
# unreachable. It is well within a usual lease, so no member leaves meanwhile.
_SILENCE_S: Final = 3.0
# If a call gets no answer within this time, it fails: the actor is unreachable or
# starting.
_CALL_S: Final = 15.0
# The most followers that wait in the actor at a time; each is one call.
_FOLLOWERS_MAX: Final = 10_000


class RayTable:
    """Holds the values of a directory inside its actor.

    Changes are numbered. ``life`` is different for each start of the actor, because the
    numbers begin again.
    """

    def __init__(self, wait_s: float = 1.0) -> None:
        # A call that waits for a change returns after this time if there is none.
        self._wait_s = wait_s
        self._life = time.time_ns()
        self._number = 0
        # Oldest change first; values with the end of their leases, None once erased.
        self._entries: OrderedDict[str, tuple[int, float, bytes | None]] = OrderedDict()
        self._changed = asyncio.Event()

    async def write(self, key: str, value: bytes, lease_s: float) -> str:
        """Write a value; return the reason for a refusal, or ""."""
        self._forget()
        if key not in self._entries and len(self._entries) >= MEMBERS_MAX:
            return f"it is full: {MEMBERS_MAX} members"
        # Cut to one byte more than allowed, so that readers still reject a longer
        # value.
        kept = value[: RECORD_BYTES_MAX + 1]
        self._set(key, time.monotonic() + lease_s, kept)
        return ""

    async def erase(self, key: str) -> None:
        """Erase a value, if it is there."""
        if key in self._entries:
            # Kept for followers that have not received it yet.
            self._set(key, time.monotonic() + 2 * _CALL_S, None)

    async def changes(
        self, life: int, number: int
    ) -> tuple[int, int, dict[str, bytes | None]]:
        """Return changes since a number; all entries if the actor was restarted.

        It waits for a change if there is none yet.
        """
        if life == self._life and number == self._number:
            changed = self._changed
            try:
                async with asyncio.timeout(self._wait_s):
                    await changed.wait()
            except TimeoutError:
                pass
        self._forget()
        since = number if life == self._life else -1
        found: dict[str, bytes | None] = {}
        for key, (at, _, value) in reversed(self._entries.items()):
            if at <= since:
                break
            if value is not None or since >= 0:
                found[key] = value
        return self._life, self._number, found

    def _set(self, key: str, until: float, value: bytes | None) -> None:
        self._number += 1
        self._entries[key] = (self._number, until, value)  # bounded: MEMBERS_MAX
        self._entries.move_to_end(key)
        self._changed.set()
        self._changed = asyncio.Event()

    def _forget(self) -> None:
        now = time.monotonic()
        for key in [k for k, (_, until, _) in self._entries.items() if until < now]:
            del self._entries[key]


class RayDirectory(Directory):
    """Keeps records in an actor of Ray: ``ray:`` or ``ray:fleet``.

    A process that is not connected to a Ray cluster connects to the one on its machine,
    or at ``RAY_ADDRESS``.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        if self.url.netloc:
            raise UsageError(
                f"directory {self}: write ray:NAME, and put Ray's address into "
                "RAY_ADDRESS"
            )
        self._name = self.url.path.strip("/") or "directory"
        self._table: Any = None

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        refusal = await self._call(
            lambda table: table.write.remote(key, value, lease_s)
        )
        if refusal:
            raise ConnectError(f"directory {self}: {refusal}", address=str(self))

    async def erase(self, key: str) -> None:
        await self._call(lambda table: table.erase.remote(key))

    async def follow(self) -> AsyncGenerator[Batch, None]:
        life = 0
        number = 0
        first = True
        while True:
            life, number, batch = await self._call(
                partial(_changes, life=life, number=number),
                _CALL_S if first else _SILENCE_S,  # it may be starting
            )
            if batch or first:
                yield batch
            first = False

    async def _call(
        self, call: Callable[[Any], Awaitable[Any]], timeout_s: float = _CALL_S
    ) -> Any:
        """Call the actor; it is looked up on a thread, because that blocks."""
        try:
            async with asyncio.timeout(_CALL_S):
                if self._table is None:
                    self._table = await asyncio.to_thread(_actor, self._name)
            async with asyncio.timeout(timeout_s):
                return await call(self._table)
        # Ray raises plain errors if it cannot be reached.
        except (RayError, RuntimeError, ValueError, OSError) as exc:
            self._table = None
            text = str(exc) or f"no answer in {timeout_s:g} s"
            raise ConnectError(f"directory {self}: {text}", address=str(self)) from exc


def _changes(table: Any, life: int, number: int) -> Any:
    return table.changes.remote(life, number)


def _actor(name: str) -> Any:
    """Return a directory's actor; create it if there is none."""
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False)
    cls = ray.remote(RayTable).options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_concurrency=_FOLLOWERS_MAX,
        max_restarts=-1,
        num_cpus=0,
    )
    return cls.remote()
