"""Two FastAPI servers: one computes the KV of prompts, the other uses it to answer.

    pip install fastapi uvicorn httpx
    python examples/fastapi_pair.py prefill 8001
    python examples/fastapi_pair.py decode 8000 http://127.0.0.1:8001
    curl 'http://127.0.0.1:8000/answer?prompt=who+are+you,+said+the+caterpillar'
    curl -N 'http://127.0.0.1:8000/stream?prompt=who+are+you,+said+the+caterpillar'

Requests go over HTTP, KV over kvwire. Kill prefill, and decode computes prompts itself.
docs/howto/http-server.md explains it: memory, time limits, clients that disconnect, and
a prefill server that restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, TypeAlias

import httpx
import uvicorn
from fastapi import BackgroundTasks, FastAPI, HTTPException, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

import kvwire
from toy_model import LETTERS, SPEC, Pool, ToyModel, blocks_for, text_of, tokens_of

HOST: Final = os.environ.get("HOST", "127.0.0.1")
# The KV blocks of all requests of decode together.
BLOCKS: Final = int(os.environ.get("BLOCKS", "1024"))
# Waiting longer for KV costs more than computing the prompt here.
PATIENCE_S: Final = float(os.environ.get("PATIENCE_S", "2"))
# Longer requests are ended.
REQUEST_S: Final = 60.0
# The prompts that prefill computes at a time; each has its own memory.
PREFILLS_MAX: Final = 4
# The toy model's context, less some room for the answer.
PROMPT_MAX: Final = 900
NEW_MAX: Final = 100

model = ToyModel()
logger = logging.getLogger("uvicorn.error")
Token = Annotated[int, Field(ge=0, lt=len(LETTERS))]
Prompt: TypeAlias = Annotated[str, Query(min_length=2, max_length=PROMPT_MAX)]
New: TypeAlias = Annotated[int, Query(ge=1, le=NEW_MAX)]


class Order(BaseModel):
    """Compute the KV of these tokens, and publish it under this id."""

    id: str
    tokens: Annotated[list[Token], Field(min_length=1, max_length=PROMPT_MAX)]
    patience_s: Annotated[float, Field(gt=0, le=REQUEST_S)]


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open one communicator per process, on uvicorn's loop."""
    async with kvwire.open(name=app.title) as comm, httpx.AsyncClient() as http:
        app.state.comm = comm
        app.state.http = http
        app.state.kv = str(await comm.listen(f"{HOST}:0"))
        yield


prefill = FastAPI(title="prefill", lifespan=lifespan)
decode = FastAPI(title="decode", lifespan=lifespan)

# --- prefill --------------------------------------------------------------------------

turns = asyncio.Semaphore(PREFILLS_MAX)


class ConsumerGone(Exception):
    """No consumer is left for the KV that is being computed."""


@prefill.post("/prefill")
async def compute(order: Order, tasks: BackgroundTasks) -> dict[str, str]:
    """Reply at once, then compute; each layer is sent as soon as it is computed."""
    count = len(order.tokens)
    blocks = blocks_for(count)
    pool = Pool(len(blocks))
    out = prefill.state.comm.publish(
        order.id, pool.cache, blocks, tokens=count, deadline=order.patience_s
    )

    def on_written(layer: int, start: int, stop: int) -> None:
        if out.done():  # before its end: decode has given up
            raise ConsumerGone
        out.ready(layers=layer)

    async def forward() -> None:
        with contextlib.suppress(ConsumerGone):
            async with turns, out:
                await asyncio.to_thread(
                    model.forward, order.tokens, pool, blocks, 0, on_written
                )

    tasks.add_task(forward)
    return {"kv": prefill.state.kv}


@prefill.get("/health")
async def alive() -> dict[str, str]:
    """Answer while the loop runs."""
    return {"status": "ok"}


# --- decode ---------------------------------------------------------------------------

memory = Pool(BLOCKS)
free = kvwire.BlockPool(BLOCKS, SPEC.block_tokens)


class Job:
    """An answer that is being computed, in a task of its own."""

    def __init__(self, prompt: str, new: int) -> None:
        self.tokens = tokens_of(prompt)
        self.new = new
        count = free.blocks_for(len(self.tokens) + new)
        if count > free.free_blocks:
            raise HTTPException(429, "no memory; try again", {"Retry-After": "1"})
        self.blocks = free.allocate(count)
        # Bounded by NEW_MAX. A client that reads slowly holds no blocks.
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._answer()
        except TimeoutError:
            self.events.put_nowait({"error": f"not done in {REQUEST_S:g} s"})
        finally:
            # Neither kvwire nor the model touches them any more.
            free.free(self.blocks)
            self.events.put_nowait(None)

    async def _answer(self) -> None:
        """Get the prompt's KV, compute the missing part, and generate."""
        *prompt, token = self.tokens
        known = await self._fetch(prompt)
        if known < len(prompt):
            await self._forward(prompt[known:], known)
        for place in range(len(prompt), len(prompt) + self.new):
            token = await self._forward([token], place)
            self.events.put_nowait({"text": text_of([token])})
        self.events.put_nowait({"tokens": len(prompt), "from_prefill": known})

    async def _fetch(self, prompt: list[int]) -> int:
        """Return the number of tokens whose KV prefill has sent."""
        order = Order(id=uuid.uuid4().hex, tokens=prompt, patience_s=PATIENCE_S)
        try:
            reply = await decode.state.http.post(
                f"{sys.argv[3]}/prefill", json=order.model_dump(), timeout=PATIENCE_S
            )
            reply.raise_for_status()
        except httpx.HTTPError:
            return 0
        peer = decode.state.comm.peer(reply.json()["kv"])
        filled = self.blocks[: free.blocks_for(len(prompt))]
        # At the end of the block, kvwire no longer touches the blocks.
        async with peer.pull(
            order.id, memory.cache, filled, tokens=len(prompt), deadline=PATIENCE_S
        ) as inc:
            outcome = await inc
        return int(outcome.usable_tokens)

    async def _forward(self, tokens: list[int], start: int) -> int:
        """Run the model on a thread; if cancelled, wait, since it writes to blocks."""
        step = asyncio.create_task(
            asyncio.to_thread(model.forward, tokens, memory, self.blocks, start)
        )
        try:
            return await asyncio.shield(step)
        finally:
            await asyncio.wait([step])


class JobStream(StreamingResponse):
    """Streams the events of a job, and ends the job when the response ends."""

    def __init__(self, job: Job) -> None:
        super().__init__(self._events(job), media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._job.task.cancel():
                await asyncio.wait([self._job.task])
                logger.info("a client has gone; %d blocks are free", free.free_blocks)

    async def _events(self, job: Job) -> AsyncIterator[str]:
        while (event := await job.events.get()) is not None:
            yield f"data: {json.dumps(event)}\n\n"


@decode.get("/stream")
async def stream(prompt: Prompt, new: New = 40) -> JobStream:
    """Answer a prompt token by token, as server-sent events."""
    return JobStream(Job(prompt, new))


@decode.get("/answer")
async def answer(prompt: Prompt, new: New = 40) -> dict[str, Any]:
    """Answer a prompt when all tokens are there."""
    job = Job(prompt, new)
    whole: dict[str, Any] = {"text": ""}
    while (event := await job.events.get()) is not None:
        whole["text"] += event.pop("text", "")
        whole |= event
    return whole


@decode.get("/health")
async def health() -> dict[str, int]:
    """Answer without prefill too: decode is slower then, but still healthy."""
    return {"free_blocks": free.free_blocks}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prefill", port]:
            app = prefill
        case ["decode", port, _]:
            app = decode
        case _:
            sys.exit(__doc__)
    uvicorn.run(
        app, host=HOST, port=int(port), timeout_graceful_shutdown=int(REQUEST_S)
    )
