"""The engines that the proxy may use: from the command line, and from a directory.

An engine in a directory has one URL, and each of its ranks has its own record. The
engine is complete when all of its ranks are listed. If two records claim the same rank,
the later one counts, so a restart replaces a record that has not expired yet. A
restarted engine is a new engine: the old one's state (draining, failures) does not
carry over.

An engine that is no longer listed, or is draining, gets no new requests and finishes
its running ones. An engine that has never answered gets none at all.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterable

from kvwire.errors import UsageError
from kvwire_vllm.announce import BOTH, DECODE, PREFILL
from kvwire_vllm.proxy.engines import VllmEngine, VllmServer
from kvwire_vllm.proxy.members import VllmMember


class EngineFleet:
    """Holds the engines, and picks among them."""

    def __init__(
        self,
        prefill: Iterable[VllmServer] = (),
        decode: Iterable[VllmServer] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock: Callable[[], float] = clock
        self._picks = itertools.count(1)
        # Bounded by the command line.
        self._static = {one: VllmEngine(server=one, role=PREFILL) for one in prefill}
        for one in decode:
            role = BOTH if one in self._static else DECODE
            self._static[one] = VllmEngine(server=one, role=role)
        # bounded: MEMBERS_MAX, both, by the watched directory
        self._members: dict[str, dict[str, VllmMember]] = {}
        self._found: dict[str, VllmEngine] = {}
        # No longer listed, but still with running requests.
        self._leaving: set[VllmEngine] = set()
        # Set when there may be a new engine, whose health is checked then.
        self.news: asyncio.Event = asyncio.Event()

    @property
    def engines(self) -> list[VllmEngine]:
        """All engines that may have a running request."""
        self._leaving = {engine for engine in self._leaving if engine.running}
        return [*self._static.values(), *self._found.values(), *self._leaving]

    def pick(
        self,
        role: str,
        tried: Collection[VllmEngine],
        model: str | None = None,
        *,
        down: bool = False,
    ) -> VllmEngine | None:
        """Return the engine for a request, or None.

        It has the fewest requests; of several, the one that was picked longest ago.
        Slow engines come last. Engines that are down are excluded, unless `down` is
        set, which selects only them.
        """
        # Every request goes through all engines, and there may be a thousand.
        roles = role, BOTH
        left = [
            engine
            for engine in (*self._static.values(), *self._found.values())
            if engine.role in roles and engine.ready and not engine.draining
        ]
        if tried or model is not None:
            left = [
                engine
                for engine in left
                if engine not in tried and model in (None, engine.model)
            ]
        choice = [engine for engine in left if engine.is_up]
        choice = choice or [engine for engine in left if down or not engine.down]
        if not choice:
            return None
        engine = min(choice, key=lambda one: (one.requests, one.picked))
        engine.picked = next(self._picks)
        return engine

    def pick_to_answer(
        self, tried: Collection[VllmEngine], model: str | None = None
    ) -> VllmEngine | None:
        """Return the engine that answers a request, or None.

        If no decode engine is up, a prefill engine answers alone. An engine that is
        down is picked only if all are down, since it may be back.
        """
        for down in (False, True):
            for role in (DECODE, PREFILL):
                engine = self.pick(role, tried, model, down=down)
                if engine is not None:
                    return engine
        return None

    def lives(self) -> bool:
        """Return whether any engine accepts requests; a single one can answer alone."""
        return any(not engine.waits_for for engine in self.engines)

    def why_none(self) -> str:
        """Return why no engine takes requests: the reason of each role's engines.

        Clients may read it, so it has no address.
        """
        waits = {
            f"{engine.role} is {engine.state} and waits for {engine.waits_for}": None
            for engine in self.engines
        }
        return "no engine takes requests: " + ("; ".join(waits) or "none is known")

    def at(self, url: str) -> VllmEngine:
        """Return the engine at a URL."""
        wanted = url.rstrip("/")
        for engine in self.engines:
            if engine.url == wanted:
                return engine
        known = ", ".join(sorted(engine.url for engine in self.engines))
        raise UsageError(f"no engine at {wanted!r}; known engines: {known or 'none'}")

    # --- records from a directory -----------------------------------------------------

    def joined(self, key: str, member: VllmMember) -> None:
        """Add or update one rank's record."""
        for url, ranks in list(self._members.items()):
            if key in ranks and url != member.url:
                self.left(key)
        self._members.setdefault(member.url, {})[key] = member
        self._update(member.url)

    def left(self, key: str) -> None:
        """Remove one rank's record."""
        for url, ranks in list(self._members.items()):
            if ranks.pop(key, None) is not None:
                self._update(url)

    def _update(self, url: str) -> None:
        """Update the engine at a URL from the records of its ranks."""
        members = self._members[url]
        if not members:
            del self._members[url]
        by_rank = {member.labels.rank: member for member in members.values()}
        first = by_rank.get(0)
        found = self._found.get(url)
        count = first.labels.ranks if first else 0
        ranks = [by_rank[rank] for rank in range(count) if rank in by_rank]
        if first is None or len(ranks) < count:
            self._retire(self._found.pop(url, None))
            return
        start = " ".join(rank.record.key for rank in ranks)
        if found is None or found.start != start:
            self._retire(found)
            remote = tuple(rank.address for rank in ranks)
            server = VllmServer(url, remote, first.labels.stages)
            found = VllmEngine(server=server, role="", start=start, ready=False)
            self._found[url] = found
            self.news.set()
        record = first.record
        found.slots = first.labels.slots
        found.role = record.role
        found.model = record.model
        found.labels = record.labels
        found.transports = record.transports
        found.load = min(1.0, max(rank.record.load for rank in ranks))

    def _retire(self, engine: VllmEngine | None) -> None:
        if engine is not None:
            engine.listed = False
            self._leaving.add(engine)  # bounded: PROXY_RUNNING_MAX, by what they run
