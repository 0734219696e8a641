"""Two FastAPI servers: one computes the KV of prompts, the other uses it to answer.

    pip install fastapi uvicorn httpx
    python examples/fastapi_pair.py prefill 8001
    python examples/fastapi_pair.py decode 8000 http://127.0.0.1:8001
    curl 'http://127.0.0.1:8000/answer?prompt=who+are+you,+said+the+caterpillar'

Requests go over HTTP, KV over kvwire. Kill prefill, and decode computes prompts itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
import uvicorn
from fastapi import BackgroundTasks, FastAPI, Query
from pydantic import BaseModel, Field

import kvwire
from toy_model import LETTERS, Pool, ToyModel, blocks_for, text_of, tokens_of

PROMPT_MAX = 900
NEW = 40
PREFILL = sys.argv[3] if len(sys.argv) > 3 else ""
Token = Annotated[int, Field(ge=0, lt=len(LETTERS))]
model = ToyModel()


class Order(BaseModel):
    """Compute the KV of these tokens, and publish it under this id."""

    id: str
    tokens: Annotated[list[Token], Field(min_length=1, max_length=PROMPT_MAX)]


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open one communicator per process, on uvicorn's loop."""
    async with kvwire.open(name=app.title) as comm, httpx.AsyncClient() as http:
        app.state.comm = comm
        app.state.http = http
        app.state.kv = str(await comm.listen("127.0.0.1:0"))
        yield


prefill = FastAPI(title="prefill", lifespan=lifespan)
decode = FastAPI(title="decode", lifespan=lifespan)


@prefill.post("/prefill")
async def compute(order: Order, tasks: BackgroundTasks) -> dict[str, str]:
    """Reply at once, then compute; each layer is sent as soon as it is computed."""
    count = len(order.tokens)
    blocks = blocks_for(count)
    pool = Pool(len(blocks))
    out = prefill.state.comm.publish(order.id, pool.cache, blocks, tokens=count)

    def on_written(layer: int, start: int, stop: int) -> None:
        out.ready(layers=layer)

    async def forward() -> None:
        async with out:
            await asyncio.to_thread(
                model.forward, order.tokens, pool, blocks, 0, on_written
            )

    tasks.add_task(forward)
    return {"kv": prefill.state.kv}


@decode.get("/answer")
async def answer(
    prompt: Annotated[str, Query(min_length=2, max_length=PROMPT_MAX)],
) -> dict[str, str | int]:
    """Answer a prompt with KV from prefill; compute what does not arrive."""
    tokens = tokens_of(prompt)
    blocks = blocks_for(len(tokens) + NEW)
    pool = Pool(len(blocks))
    known = await fetch(tokens[:-1], pool, blocks)
    new = await asyncio.to_thread(model.answer, tokens, pool, blocks, NEW, known)
    return {"text": text_of(new), "tokens": len(tokens) - 1, "from_prefill": known}


async def fetch(tokens: list[int], pool: Pool, blocks: list[int]) -> int:
    """Return the number of tokens whose KV prefill has sent."""
    order = Order(id=uuid.uuid4().hex, tokens=tokens)
    try:
        reply = await decode.state.http.post(
            f"{PREFILL}/prefill", json=order.model_dump()
        )
    except httpx.HTTPError:
        return 0
    peer = decode.state.comm.peer(reply.raise_for_status().json()["kv"])
    filled = blocks[: len(blocks_for(len(tokens)))]
    async with peer.pull(
        order.id, pool.cache, filled, tokens=len(tokens), deadline=30.0
    ) as inc:
        outcome = await inc
    return int(outcome.usable_tokens)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prefill", port]:
            uvicorn.run(prefill, port=int(port))
        case ["decode", port, _]:
            uvicorn.run(decode, port=int(port))
        case _:
            sys.exit(__doc__)
