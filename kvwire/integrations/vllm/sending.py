"""One prompt's KV on its way out, marked from the forward pass.

A forward pass may not wait: not for a peer to be dialled, and not for a loop. So what
it says before the transfer exists is kept, and said as soon as it does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable
from typing import Any

from kvwire import Communicator, Engine, Outcome, Outgoing, PagedCache
from kvwire.errors import KVWireError, UsageError
from kvwire.integrations.vllm.metadata import Blocks, SendPrompt
from kvwire.integrations.vllm.peers import Peers, PromptEnd
from kvwire.integrations.vllm.topology import RankRoute

logger: logging.Logger = logging.getLogger("kvwire.vllm")


class PromptSend(PromptEnd[Outgoing]):
    """Sends one prompt's KV to one decode engine."""

    def __init__(
        self,
        engine: Engine,
        send: SendPrompt,
        cache: PagedCache,
        peers: Peers,
        route: RankRoute,
    ) -> None:
        self.tokens: int = send.tokens  # of the prompt
        # How many leading blocks of each list the forward pass has completed.
        self.written: dict[str, int] = {}
        self.finished: bool = False  # whether all of them are
        super().__init__(engine, cache, peers, route)
        self._send = send
        # What was said before there was anybody to say it to.
        self._early: list[Callable[[Outgoing], None]] | None = []
        # Resolves when nothing of kvwire can touch the blocks any more; never fails.
        self.done: concurrent.futures.Future[list[Outcome]] = engine.start(self._run)

    def extend(self, blocks: Blocks) -> None:
        """Add blocks that the prompt got; from any thread, does not wait."""
        if any(blocks.values()):
            self._say(Outgoing.extend, blocks)

    def ready(
        self, group: str, layers: slice, blocks: slice, after: object | None
    ) -> None:
        """Mark layers of some blocks as written; from any thread, no waiting."""
        self._say(Outgoing.ready, layers, blocks, group=group, after=after)

    def finish(self) -> None:
        """Mark everything as written; from any thread, does not wait."""
        self.finished = True
        self._say(Outgoing.finish)

    def renew(self) -> None:
        """Renew the lease, as prefill goes on."""
        self._engine.start(self._renew)

    # --- on the loop ------------------------------------------------------------------

    async def _run(self, communicator: Communicator) -> list[Outcome]:
        try:
            outs = await self._begin(communicator)
        except (KVWireError, asyncio.CancelledError) as exc:
            # The decode engine hears nothing, and computes when its time is over.
            said = self._reason or str(exc) or repr(exc)
            logger.warning("transfer %s was not begun: %s", self._route.id, said)
            return []
        with self._lock:
            early, self._early = self._early or [], None
            self._parts, self._begun = outs, True
            for call in [] if self._reason else early:
                for out in outs:
                    call(out)
        if self._reason:
            # Begun only to say so; in the same turn, so no block was touched.
            await self._abort(communicator)
        outcomes = [await out for out in outs]
        for out in outs:
            await out.drained()
        return outcomes

    async def _begin(self, communicator: Communicator) -> list[Outgoing]:
        send, route = self._send, self._route
        options = {**send.options, "growing": True}
        if not route.pushed:
            options["consumers"] = len(route.peers)
            return [communicator.publish(route.id, self._cache, send.blocks, **options)]
        links = [
            (await self._peers.connection(peer.address), peer.id)
            for peer in route.peers
        ]
        return [
            link.push(name, self._cache, send.blocks, **options) for link, name in links
        ]

    async def _renew(self, communicator: Communicator) -> None:
        for out in self._parts:
            out.renew_lease()

    def _say(self, call: Callable[..., None], *what: Any, **more: Any) -> None:
        with self._lock:
            if self._early is not None:
                # bounded by the marks of one prompt
                self._early.append(lambda out: call(out, *what, **more))
                return
            outs = self._parts
        for out in outs:
            try:
                call(out, *what, **more)
            except UsageError:
                # The transfer may have ended under us; a forward pass need not know.
                if not out.done():
                    raise
