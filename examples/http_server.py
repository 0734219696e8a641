"""An HTTP server that streams tokens: one process prefills, another one decodes.

    pip install starlette uvicorn
    python examples/http_server.py prefill --listen 127.0.0.1:7400
    python examples/http_server.py decode --http 127.0.0.1:8000
    curl -N -d '{"prompt": "who are you, said the caterpillar", "new": 40}' \
        http://127.0.0.1:8000/generate

docs/howto/http-server.md explains it: time limits, clients that disconnect, a prefill
process that restarts, status 429 when memory is short, and health.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import msgspec
import uvicorn
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import kvwire
from kvwire.integrations.marks import LayerMarks
from toy_model import SPEC, Pool, ToyModel, blocks_for, text_of, tokens_of

ORDERS: Final = 1
"""The tag of messages that contain orders for prefill."""

# The toy model's context, less some room for the answer.
PROMPT_MAX: Final = 900
NEW_MAX: Final = 100
BODY_BYTES_MAX: Final = 16_384
# Longer requests are ended.
REQUEST_S: Final = 60.0
# The prompts that prefill computes at a time; each has its own memory.
PREFILLS_MAX: Final = 4

logger = logging.getLogger("http_server")
Letter = Annotated[int, Meta(ge=0, le=28)]


class Order(msgspec.Struct):
    """Compute the KV of these tokens, and publish it under this id."""

    id: str
    tokens: Annotated[list[Letter], Meta(min_length=1, max_length=PROMPT_MAX)]
    patience_s: Annotated[float, Meta(gt=0, le=REQUEST_S)]


class Ask(msgspec.Struct):
    """The body of a request to ``/generate``."""

    prompt: Annotated[str, Meta(min_length=2, max_length=PROMPT_MAX)]
    new: Annotated[int, Meta(ge=1, le=NEW_MAX)] = 40


# --- prefill --------------------------------------------------------------------------


class ConsumerGone(Exception):
    """No consumer is left for the KV that is being computed."""


class Prefill:
    """Computes prompts for every peer that connects."""

    def __init__(self, comm: kvwire.Communicator) -> None:
        self._comm = comm
        self._model = ToyModel()
        self._free = asyncio.Semaphore(PREFILLS_MAX)

    async def take_orders(
        self, conn: kvwire.Connection, tasks: asyncio.TaskGroup
    ) -> None:
        """Prefill the prompts that one peer orders, until it disconnects."""
        with contextlib.suppress(kvwire.KVWireError):
            while True:
                raw = await conn.recv(ORDERS)
                try:
                    order = msgspec.json.decode(raw, type=Order)
                except msgspec.MsgspecError as exc:
                    logger.warning("%s sent no order: %s", conn.peer.name, exc)
                else:
                    tasks.create_task(self._prefill(order))

    async def _prefill(self, order: Order) -> None:
        """Compute one prompt; its layers are sent meanwhile."""
        try:
            async with asyncio.timeout(order.patience_s):
                await self._free.acquire()
        except TimeoutError:
            return  # decode computes the prompt itself by now
        try:
            await self._publish(order)
        except ConsumerGone:
            logger.info("%s: no consumer waits for it any more", order.id)
        except kvwire.UsageError as exc:
            logger.warning("%s: %s", order.id, exc)
        finally:
            self._free.release()

    async def _publish(self, order: Order) -> None:
        tokens = order.tokens
        blocks = blocks_for(len(order.tokens))
        pool = Pool(len(blocks))
        out = self._comm.publish(
            order.id,
            pool.cache,
            blocks,
            tokens=len(tokens),
            deadline=order.patience_s,
        )
        marks = LayerMarks(out, len(tokens), SPEC.block_tokens)

        def on_written(layer: int, start: int, stop: int) -> None:
            if out.done():  # before finish(): the other side has ended it
                raise ConsumerGone
            marks(layer, start, stop)

        async with out:
            await asyncio.to_thread(
                self._model.forward, tokens, pool, blocks, 0, on_written
            )
        await out
        await out.drained()


async def serve_prefill(listen: str) -> None:
    """Take orders from every peer that connects."""
    async with kvwire.open(name="prefill") as comm, asyncio.TaskGroup() as tasks:
        prefill = Prefill(comm)
        print(f"prefill listens on {await comm.listen(listen)}", flush=True)
        async for conn in comm.connections():
            tasks.create_task(prefill.take_orders(conn, tasks))


# --- decode ---------------------------------------------------------------------------


class Job:
    """One request: its blocks, and the events that its client has not read yet."""

    def __init__(self, ask: Ask, blocks: list[int]) -> None:
        self.prompt = tokens_of(ask.prompt)
        self.new = ask.new
        self.blocks = blocks
        self.incoming: kvwire.Incoming | None = None
        # Bounded by NEW_MAX. A client that reads slowly holds no blocks.
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()


class Decoder:
    """Generates text, with KV from a prefill process if there is one."""

    def __init__(
        self,
        comm: kvwire.Communicator,
        prefill: str,
        *,
        num_blocks: int,
        patience_s: float,
    ) -> None:
        self._peer = comm.peer(prefill)
        self._patience_s = patience_s
        self._model = ToyModel()
        self._pool = Pool(num_blocks)
        self._blocks = kvwire.BlockPool(num_blocks, SPEC.block_tokens)
        start = f"{comm.name}/{comm.incarnation.hex()[:8]}"
        self._ids = (f"{start}/{number}" for number in itertools.count())
        self._running: set[asyncio.Task[None]] = set()

    def health(self) -> dict[str, Any]:
        """Return the answer of ``/health``."""
        return {
            "prefill": "connected" if self._peer.connection else "gone",
            "running": len(self._running),
            "free_blocks": self._blocks.free_blocks,
        }

    async def stay_connected(self) -> None:
        """Dial prefill again whenever the connection is lost."""
        while True:
            try:
                conn = await self._peer.connect()
            except kvwire.KVWireError as exc:
                logger.warning("no prefill: %s", exc)
                await asyncio.sleep(1)
                continue
            print("prefill is connected", flush=True)
            await conn.wait_closed()
            print("prefill is gone", flush=True)

    def start(self, ask: Ask) -> tuple[Job, asyncio.Task[None]]:
        """Start to generate, if there is memory for it.

        Raises:
            HTTPException: 429: other requests use the blocks.
        """
        count = self._blocks.blocks_for(len(ask.prompt) + ask.new)
        if count > self._blocks.free_blocks:
            raise HTTPException(429, "no memory; try again", {"Retry-After": "1"})
        job = Job(ask, self._blocks.allocate(count))
        task = asyncio.create_task(self._run(job))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return job, task

    async def _run(self, job: Job) -> None:
        ended = "the request has ended"
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._generate(job)
        except TimeoutError:
            job.events.put_nowait({"error": f"not done in {REQUEST_S:g} s"})
        except asyncio.CancelledError:
            ended = "the client has gone"
            raise
        finally:
            if job.incoming is not None:
                job.incoming.abort(ended)  # has no effect if everything has landed
                # only then may other requests use the blocks
                await job.incoming.drained()
            self._blocks.free(job.blocks)
            print(f"{ended}; {self._blocks.free_blocks} blocks are free", flush=True)
            job.events.put_nowait(None)

    async def _generate(self, job: Job) -> None:
        tokens = len(job.prompt) - 1
        missing = await self._fetch(job)
        for start, stop in missing:
            await self._forward(job, job.prompt[start:stop], start)
        token = job.prompt[-1]
        for place in range(tokens, tokens + job.new):
            token = await self._forward(job, [token], place)
            job.events.put_nowait({"text": text_of([token])})
        computed = sum(stop - start for start, stop in missing)
        job.events.put_nowait({"received": tokens - computed, "computed": computed})

    async def _fetch(self, job: Job) -> list[tuple[int, int]]:
        """Have a prompt prefilled and pull its KV; return the missing token ranges."""
        tokens = job.prompt[:-1]
        conn = self._peer.connection
        if conn is None:
            return [(0, len(tokens))]
        order = Order(next(self._ids), tokens, self._patience_s)
        filled = job.blocks[: self._blocks.blocks_for(len(tokens))]
        job.incoming = conn.pull(
            order.id,
            self._pool.cache,
            filled,
            tokens=len(tokens),
            deadline=self._patience_s,
        )
        with contextlib.suppress(kvwire.KVWireError):  # the outcome has the reason too
            await conn.send(ORDERS, msgspec.json.encode(order))
        outcome = await job.incoming
        await job.incoming.drained()  # from here on, the blocks may also be written to
        if not outcome.complete:
            logger.warning("%s: %r", order.id, outcome)
        request = kvwire.PrefillRequest(
            id=order.id,
            num_tokens=len(tokens),
            blocks=filled,
            block_tokens=SPEC.block_tokens,
        )
        plan = kvwire.plan_prefill([request], {order.id: outcome})
        return [(r.start, r.stop) for r in plan.prefill.get(order.id, ())]

    async def _forward(self, job: Job, tokens: list[int], start: int) -> int:
        """Run the model on a thread; if cancelled, wait, since it writes to blocks."""
        step = asyncio.create_task(
            asyncio.to_thread(
                self._model.forward, tokens, self._pool, job.blocks, start
            )
        )
        try:
            return await asyncio.shield(step)
        finally:
            await asyncio.wait([step])


# --- HTTP -----------------------------------------------------------------------------


class TokenStream(StreamingResponse):
    """Streams the events of a job, and ends the job when the response ends."""

    def __init__(self, job: Job, task: asyncio.Task[None]) -> None:
        super().__init__(self._events(job), media_type="text/event-stream")
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._task.cancel()

    async def _events(self, job: Job) -> AsyncIterator[bytes]:
        while (event := await job.events.get()) is not None:
            yield b"data: " + msgspec.json.encode(event) + b"\n\n"


async def generate(request: Request) -> TokenStream:
    """``POST /generate``."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise HTTPException(413, f"at most {BODY_BYTES_MAX} bytes")
    try:
        ask = msgspec.json.decode(body, type=Ask)
    except msgspec.MsgspecError as exc:
        raise HTTPException(400, str(exc)) from None
    return TokenStream(*request.state.decoder.start(ask))


async def health(request: Request) -> JSONResponse:
    """``GET /health``. Without prefill the server is slower, but still healthy."""
    return JSONResponse(request.state.decoder.health())


def serve_decode(options: argparse.Namespace) -> None:
    """Answer HTTP requests until a signal arrives; then finish the open ones."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Decoder]]:
        async with kvwire.open(name="decode") as comm:
            decoder = Decoder(
                comm,
                options.prefill,
                num_blocks=options.blocks,
                patience_s=options.patience,
            )
            connecting = asyncio.create_task(decoder.stay_connected())
            yield {"decoder": decoder}
            connecting.cancel()

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/health", health),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    host, _, port = options.http.rpartition(":")
    bound = socket.create_server((host, int(port)))
    print("decode answers on {}:{}".format(*bound.getsockname()), flush=True)
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=int(REQUEST_S)
    )
    uvicorn.Server(config).run(sockets=[bound])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("prefill").add_argument("--listen", default="127.0.0.1:7400")
    decode = roles.add_parser("decode")
    decode.add_argument("--prefill", default="127.0.0.1:7400")
    decode.add_argument("--http", default="127.0.0.1:8000")
    decode.add_argument("--blocks", type=int, default=1024, help="KV blocks in total")
    # Waiting longer than this costs more than computing the prompt here.
    decode.add_argument("--patience", type=float, default=2.0, help="seconds for KV")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    with contextlib.suppress(KeyboardInterrupt):
        if options.role == "prefill":
            asyncio.run(serve_prefill(options.listen))
        else:
            serve_decode(options)


if __name__ == "__main__":
    main()
