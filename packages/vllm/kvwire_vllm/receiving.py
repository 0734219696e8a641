"""Receiving one prompt's KV, from one or several ranks of another engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

import numpy as np

from kvwire import (
    Communicator,
    Connection,
    Engine,
    Incoming,
    Outcome,
    PagedCache,
    RemoteWindow,
    Request,
)
from kvwire.errors import (
    AuthenticationFailed,
    ConnectError,
    ConnectionClosed,
    HandshakeError,
    HandshakeTimeout,
    RequestCancelled,
    UsageError,
    error_text,
)
from kvwire.kv.blocks import Ids
from kvwire_vllm.metadata import LoadPrompt
from kvwire_vllm.offering import release
from kvwire_vllm.peers import Peers, PromptEnd
from kvwire_vllm.tickets import seal
from kvwire_vllm.topology import RankRoute, lacking

logger: logging.Logger = logging.getLogger("kvwire.vllm")

_LACKING: Final = (
    "none of the ranks in the request has {}; the request names too few ranks, or a "
    "wrong number of pipeline stages"
)


class Patience(NamedTuple):
    """How long a prompt is waited for."""

    load_s: float  # until all of it is here; it may wait behind many others
    # Until it is published, if prefill has answered. Then it is published already or
    # never will be: it was fetched before, or prefill has restarted.
    published_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """The result of receiving a prompt's KV."""

    missing: Mapping[str, Ids]  # ids of the missing blocks, by cache group
    outcomes: Sequence[Outcome] = ()  # the outcomes of its transfers, if any began
    reason: str = ""  # why wanted blocks are missing; see `metrics`


class PromptReceive(PromptEnd[Incoming]):
    """Receives a prompt's KV from one prefill engine."""

    def __init__(
        self,
        engine: Engine,
        load: LoadPrompt,
        cache: PagedCache,
        peers: Peers,
        route: RankRoute,
        patience: Patience,
        after: object | None,
        codec: str = "",
    ) -> None:
        super().__init__(engine, cache, route)
        self._peers = peers
        self.load = load  # the prompt to fetch
        self._patience = patience
        self._after = after
        self._codec = codec or None
        self._left = "anything"
        # Its reads from prefill's windows, if it has a ticket.
        self._reads: list[Request[Outcome]] = []
        # Resolves when kvwire no longer touches the blocks; never fails.
        self.done: concurrent.futures.Future[ReceiveResult] = engine.start(
            self._run(engine.communicator)
        )

    # --- on the loop ------------------------------------------------------------------

    async def _run(self, communicator: Communicator) -> ReceiveResult:
        load = self.load
        parts: list[Incoming] = []
        try:
            self._follow(load)
            if load.ticketed:
                return await self._read(communicator)
            await self._begin(communicator, parts)
        except (Exception, asyncio.CancelledError) as exc:  # noqa: BLE001 - it would end vLLM's engine
            why = self.reason or error_text(exc)
            logger.warning("could not start transfer %s: %s", self._route.id, why)
            for part in parts:
                part.abort("the parts on other ranks were not requested")
            self._parts = parts
            for part in parts:
                await part.drained()
            reason = "" if self.reason or load.declined else _why(exc)
            return self._result(load.blocks, reason=reason)
        with self._lock:
            self._parts = parts
            self._begun = True
        if self.reason or load.declined:
            await self._abort()
        impatience = asyncio.get_running_loop().call_later(
            self._patience.published_s, self._end_unmet
        )
        outcomes = [await part for part in self._parts]
        impatience.cancel()
        for part in self._parts:
            await part.drained()
        left = self._lacking()
        if left and all(part.met for part in self._parts):
            logger.error("transfer %s: %s", self._route.id, _LACKING.format(left))
            return self._result(load.blocks, outcomes, "refused")
        return self._arrived(outcomes)

    def _arrived(self, outcomes: Sequence[Outcome]) -> ReceiveResult:
        """Return the result of the ended transfers or reads."""
        load = self.load
        result = self._result(
            {
                name: np.concatenate([one.missing.ids(name) for one in outcomes])
                for name in load.blocks
            },
            outcomes,
            self._why_missing(outcomes),
        )
        reasons = [reason for o in outcomes for reason in o.missing.reasons]
        for name, ids in {} if self.reason else result.missing.items():
            if ids.size:
                logger.warning(
                    "transfer %s: %d of %d blocks of %r did not arrive: %s",
                    self._route.id,
                    ids.size,
                    len(load.blocks[name]) - load.cached[name],
                    name,
                    "; ".join(dict.fromkeys(reasons)),
                )
        return result

    def _result(
        self,
        lost: Mapping[str, Sequence[int] | Ids],
        outcomes: Sequence[Outcome] = (),
        reason: str = "",
    ) -> ReceiveResult:
        """Return the missing blocks, without the blocks that were here before.

        Other requests share those, and vLLM fails or rewinds every request with a
        reported block.
        """
        blocks = self.load.blocks
        cached = self.load.cached
        own = {name: ids[cached[name] :] for name, ids in blocks.items()}
        missing = {name: np.intersect1d(own[name], ids) for name, ids in lost.items()}
        return ReceiveResult(missing, outcomes, reason)

    def _why_missing(self, outcomes: Sequence[Outcome]) -> str:
        if self.reason or self.load.declined or all(one.complete for one in outcomes):
            return ""
        met = not self._parts or any(part.met for part in self._parts)
        return "missing" if met else "unpublished"

    async def _read(self, communicator: Communicator) -> ReceiveResult:
        """Read the blocks that the ticket names, and free them at prefill."""
        if self._after is not None and not self.load.declined:
            await communicator.fired(self._after)
        links: list[Connection] = []
        outcomes: list[Outcome] = []
        try:
            while True:
                lost = any(link.closed for link in links)
                links = [
                    await self._peers.connection(communicator, peer)
                    for peer in self._route.peers
                ]
                if self.load.declined:
                    return self._result(self.load.blocks)
                outcomes = await self._read_once(links)
                # If a connection ends, the whole prompt is read once more over a new
                # one.
                if lost or not any(link.closed for link in links):
                    return self._arrived(outcomes)
        finally:
            nbytes = [one.nbytes for one in outcomes] or [0] * len(links)
            for link, read_bytes in zip(links, nbytes, strict=True):
                release(link, self._route.id, read_bytes)

    async def _read_once(self, links: Sequence[Connection]) -> list[Outcome]:
        windows = [await self._peers.window(link) for link in links]
        with self._lock:
            self._begun = True
        if self.reason:
            raise RequestCancelled(self.reason)
        self._reads = []
        try:
            self._begin_reads(windows)
            return [await read for read in self._reads]
        finally:
            for read in self._reads:
                read.cancel()
                await read.released()

    def _begin_reads(self, windows: Sequence[RemoteWindow]) -> None:
        """Read each rank's part.

        Raises:
            UsageError: The ticket is for another prompt, or from other ranks.
        """
        load = self.load
        ranks = self._route.ranks
        for window, rank in zip(windows, ranks, strict=True):
            right = load.seals and seal(window.serial, load.sealed)
            if not right or not hmac.compare_digest(right, load.seals[rank]):
                raise UsageError(
                    "its ticket belongs to another prompt, or to an engine that has "
                    "ended"
                )
        brought = [
            {
                name: (spec.layer_indices, spec.heads)
                for name, spec in window.specs.items()
            }
            for window in windows
        ]
        groups = self._cache.groups
        specs = {name: group.spec for name, group in groups.items()}
        if left := lacking(specs, brought):
            raise UsageError(_LACKING.format(left))
        if any(load.cached.values()) and any(
            window.specs[name].block_tokens != spec.block_tokens
            for window in windows
            for name, spec in specs.items()
        ):
            raise UsageError(
                "its first blocks are cached here, and prefill's blocks have "
                "a different size"
            )
        parts = [(name, slice(load.cached[name], None)) for name in groups]
        own = {name: load.blocks[name][part] for name, part in parts}
        there = {name: load.there[name][part] for name, part in parts}
        generations = {name: load.generations[name][part] for name, part in parts}
        within = timedelta(seconds=self._patience.load_s)
        for window in windows:
            ticket = window.ticket(there, generations)
            self._reads.append(
                window.get(ticket, into=self._cache, blocks=own, deadline=within)
            )

    async def _abort(self) -> None:
        for read in self._reads:
            read.cancel()
        await super()._abort()

    async def _begin(self, communicator: Communicator, parts: list[Incoming]) -> None:
        load = self.load
        options = load.options
        options["deadline"] = timedelta(seconds=self._patience.load_s)
        if any(load.cached.values()):
            if not load.hashes:
                raise UsageError(
                    "other requests use its first blocks here; without hashes the "
                    "peer would overwrite them"
                )
            options["have"] = frozenset(
                named
                for name, count in load.cached.items()
                for named in load.hashes[name][:count]
            )
        blocks = load.blocks
        if load.declined:
            # A pull of one block that is aborted in the same turn makes the peer free
            # the prompt's blocks.
            first = next(iter(self._cache.groups))
            blocks = {name: [0] * (name == first) for name in self._cache.groups}
            options = {"tokens": {name: len(ids) for name, ids in blocks.items()}}
        options["codec"] = self._codec
        links = [
            await self._peers.connection(communicator, peer)
            for peer in self._route.peers
        ]
        if self._after is not None and not load.declined:
            await communicator.fired(self._after)
        for link in links:
            part = link.pull(self._route.id, self._cache, blocks, **options)
            parts.append(part)  # remembered even if a later pull fails

    def _lacking(self) -> str:
        """Return a part of this rank's KV that no rank sends; see :func:`lacking`."""
        if self._left:
            groups = self._cache.groups.items()
            specs = {name: group.spec for name, group in groups}
            self._left = lacking(specs, (part.carries for part in self._parts))
        return self._left

    def _end_unmet(self) -> None:
        for part in self._parts if self.load.computed else ():
            if not part.met:
                part.abort("it is no longer published")


def _why(error: BaseException) -> str:
    """Return the kind of failure to start a transfer; see :data:`metrics.REASONS`."""
    if isinstance(error, AuthenticationFailed):
        return "untrusted"
    if isinstance(error, ConnectError | ConnectionClosed | HandshakeTimeout):
        return "unreachable"
    if isinstance(error, HandshakeError):
        return "unequal"
    return "refused" if isinstance(error, UsageError) else "missing"
