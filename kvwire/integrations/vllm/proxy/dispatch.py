"""One request to two engines, until one answer begins.

::

    at once       prefill and decode are asked together; decode waits for the KV
    in sequence   decode is asked when prefill has answered
    neither       every prefill engine failed: decode computes the prompt itself

A prefill engine that fails before the answer has begun costs another try; decode's part
of the failed one is given up first, so nothing of it waits for KV that will not come. A
decode engine that cannot be reached likewise. Once the answer has begun it is the
client's, and an engine that dies then ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from kvwire.integrations.vllm.proxy.engines import Engine, Pool
from kvwire.integrations.vllm.proxy.requests import (
    IN_SEQUENCE,
    for_decode,
    for_prefill,
    is_single,
    new_transfer_id,
)

logger = logging.getLogger("kvwire")


class EngineFailed(Exception):
    """An engine could not be reached, or gave no answer that is of use.

    Attributes:
        engine: Which.
        down: Others are better off with another engine for a while.
    """

    def __init__(self, engine: Engine, why: str, *, down: bool = True) -> None:
        super().__init__(f"{engine.url}: {why}")
        self.engine = engine
        self.down = down


@dataclass(slots=True)
class Answer:
    """What a decode engine says, from its first part on.

    Attributes:
        status: Of HTTP.
        headers: Likewise.
        parts: The body as it comes.
    """

    status: int
    headers: httpx.Headers
    parts: AsyncIterator[bytes]


class Dispatcher:
    """Sends requests to engines.

    Args:
        client: For all of them.
        prefill: The engines that compute prompts.
        decode: The engines that answer.
        order: Both at once, or in sequence.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        *,
        order: str,
        route: str,
    ) -> None:
        self._client = client
        self._prefill = Pool(prefill, time.monotonic, route)
        self._decode = Pool(decode, time.monotonic)
        self._order = order

    async def ask(
        self, path: str, body: dict[str, Any], stack: AsyncExitStack
    ) -> Answer:
        """Have a request answered.

        Args:
            path: Of the API, such as ``/v1/completions``.
            body: The client's request.
            stack: Gives both engines up when it is exited.

        Returns:
            The answer, of which the first part is here.

        Raises:
            EngineFailed: No decode engine could be reached.

        Cancel safety: safe; both engines are told that nobody waits.
        """
        failed: set[Engine] = set()
        dead: set[Engine] = set()
        while True:
            decode = self._decode.pick(body, dead)
            if decode is None:
                raise EngineFailed(next(iter(dead)), "no decode engine answers")
            prefill = self._prefill.pick(body, failed) if is_single(body) else None
            try:
                async with AsyncExitStack() as attempt:
                    if prefill is None:
                        answer = await self._answer(decode, path, body, attempt)
                    else:
                        answer = await self._both(prefill, decode, path, body, attempt)
                    stack.push_async_exit(attempt.pop_all())
                    return answer
            except EngineFailed as exc:
                logger.warning("%s; trying again", exc)
                pool, out = self._decode, dead
                if exc.engine is prefill:
                    pool, out = self._prefill, failed
                out.add(exc.engine)  # bounded by the engines there are
                if exc.down:
                    pool.down(exc.engine)

    async def get(self, path: str) -> httpx.Response:
        """What a decode engine says to a GET, such as its models.

        Raises:
            EngineFailed: It cannot be reached.

        Cancel safety: safe.
        """
        engine = self._decode.pick({}, ())
        assert engine is not None
        try:
            return await self._client.get(engine.url + path)
        except httpx.HTTPError as exc:
            raise EngineFailed(engine, repr(exc)) from None

    # --- one try ----------------------------------------------------------------------

    async def _both(
        self,
        prefill: Engine,
        decode: Engine,
        path: str,
        body: dict[str, Any],
        attempt: AsyncExitStack,
    ) -> Answer:
        transfer_id = new_transfer_id()
        computed = asyncio.ensure_future(
            self._compute(prefill, path, for_prefill(body, transfer_id, decode))
        )
        # Its answer comes about when decode's does; it is not cut off for that.
        attempt.push_async_callback(_ended, computed)
        if self._order == IN_SEQUENCE:
            await computed
        answer = asyncio.ensure_future(
            self._answer(decode, path, for_decode(body, transfer_id, prefill), attempt)
        )
        try:
            return await _first_of(answer, computed)
        finally:
            if not answer.done():
                await _ended(answer)

    async def _compute(self, engine: Engine, path: str, body: dict[str, Any]) -> None:
        try:
            said = await self._client.post(engine.url + path, json=body)
        except httpx.HTTPError as exc:
            raise EngineFailed(engine, repr(exc)) from None
        if said.is_error:
            why = f"status {said.status_code}"
            raise EngineFailed(engine, why, down=said.is_server_error)

    async def _answer(
        self, engine: Engine, path: str, body: dict[str, Any], attempt: AsyncExitStack
    ) -> Answer:
        try:
            said = await attempt.enter_async_context(
                self._client.stream("POST", engine.url + path, json=body)
            )
            parts = said.aiter_raw()
            # Headers come before there is a token, so they are no answer yet.
            first = await anext(parts, b"")
        except httpx.HTTPError as exc:
            raise EngineFailed(engine, repr(exc)) from None
        return Answer(said.status_code, said.headers, _chained(first, parts))


async def _chained(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in parts:
        yield part


async def _first_of(
    answer: asyncio.Future[Answer], computed: asyncio.Future[None]
) -> Answer:
    """The answer, unless prefill fails before it begins."""
    await asyncio.wait((answer, computed), return_when=asyncio.FIRST_COMPLETED)
    if not answer.done():
        computed.result()
        await asyncio.wait((answer,))
    return answer.result()


async def _ended(future: asyncio.Future[Any]) -> None:
    """Give up what is not done, and do not mind how it ends."""
    future.cancel()
    await asyncio.wait((future,))
    if not future.cancelled():
        future.exception()
