"""Copies prefixes to other engines, as the proxy's policy decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from typing import Any

from kvwire.aio import end_task, start_task
from kvwire.integrations.vllm.announce import DECODE, PREFILL
from kvwire.integrations.vllm.proxy.ahead import AheadPolicy
from kvwire.integrations.vllm.proxy.checking import read_block_tokens
from kvwire.integrations.vllm.proxy.client import EngineClient, EngineFailed
from kvwire.integrations.vllm.proxy.dispatch import (
    ClientRequest,
    Dispatcher,
    without_decoding,
)
from kvwire.integrations.vllm.proxy.engines import VllmEngine
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.integrations.vllm.proxy.limits import (
    PROXY_COPIES_MAX,
    PROXY_COPY_S,
    PROXY_EVENT_BYTES_MAX,
)

logger: logging.Logger = logging.getLogger("kvwire.vllm")


class CopyAhead:
    """Copies the prefixes that a policy chooses, a few at a time."""

    def __init__(
        self,
        policy: AheadPolicy,
        dispatcher: Dispatcher,
        fleet: EngineFleet,
        client: EngineClient,
    ) -> None:
        self._policy = policy
        self._client = client
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._running: set[asyncio.Task[None]] = set()

    def answered(self, request: ClientRequest) -> None:
        """Record an engine's answer, and start a copy if the policy asks for one."""
        engine = request.decode
        if engine is None:
            return
        try:
            body = self._policy.answered(request.body, engine.url, self._fleet.clock())
        except Exception:
            # A plug-in may raise anything, and the request has an answer.
            logger.exception("copy ahead: the policy failed")
            return
        if body is not None:
            self.copy(request, body, {engine})

    def copy(
        self,
        request: ClientRequest,
        body: Mapping[str, Any],
        without: Collection[VllmEngine] = (),
    ) -> bool:
        """Start to copy a prefix to an engine; return whether the copy was started."""
        to = self._fleet.pick(DECODE, body, without)
        if to is None or len(self._running) >= PROXY_COPIES_MAX:
            return False
        asked = ClientRequest(
            request.path, without_decoding(body), request.headers, request.since
        )
        task = start_task(self._copy(asked, to))
        self._running.add(task)  # bounded: PROXY_COPIES_MAX
        task.add_done_callback(self._running.discard)
        return True

    async def close(self) -> None:
        """Cancel the running copies.

        Cancel safety: safe, it may be called again.
        """
        for task in [*self._running]:
            await end_task(task)

    async def _copy(self, asked: ClientRequest, to: VllmEngine) -> None:
        source = self._fleet.pick(PREFILL, asked.body, {to}, to.model)
        try:
            async with asyncio.timeout(PROXY_COPY_S), AsyncExitStack() as attempt:
                prompt = asked.body.get("prompt")
                if isinstance(prompt, list):
                    size = await read_block_tokens(self._client, to)
                    asked.body["prompt"] = full_blocks(prompt, size)
                response = await self._dispatcher.ask_once(source, to, asked, attempt)
                await response.body(PROXY_EVENT_BYTES_MAX)
        except (EngineFailed, TimeoutError) as exc:
            logger.info("copy ahead to %s failed: %s", to.url, str(exc) or "too slow")
            return
        status = "refused" if response.is_error else "done"
        logger.info("copy ahead to %s: %s", to.url, status)


def full_blocks(prompt: list[Any], size: int) -> list[Any]:
    """Return the part of a prompt's tokens that is worth a copy.

    An engine's cache contains full blocks, and it computes a prompt's last token in any
    case. So one token after the full blocks is enough; more would be computed for
    nothing.

    Args:
        prompt: Tokens; anything else is returned unchanged.
        size: The number of tokens in a block; 0 if it is unknown.
    """
    if not size or not all(type(one) is int for one in prompt):
        return prompt
    return prompt[: (len(prompt) - 1) // size * size + 1]
