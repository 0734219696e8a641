"""An HTTP server with ``/generate``: one process prefills, another one decodes.

    python examples/asyncio_server.py prefill --listen 127.0.0.1:7400
    python examples/asyncio_server.py decode --http 127.0.0.1:8000
    curl -d '{"prompt": "who are you, said the caterpillar", "new": 40}' \
        http://127.0.0.1:8000/generate

Decode sends the prompt to prefill as a message and pulls its KV. Whatever does not
arrive, because prefill is slow, broken or not there at all, decode computes itself: a
request is late then, and never wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
from datetime import timedelta
from typing import Annotated, Final

import msgspec
from msgspec import Meta

import kvwire
from kvwire.integrations.marks import LayerMarks
from toy_model import SPEC, Pool, ToyModel, blocks_for, text_of, tokens_of

PROMPTS: Final = 1
"""The tag of messages with orders for prefill."""

# What the toy model has places for, less some for the answer.
PROMPT_MAX: Final = 900
NEW_MAX: Final = 100
BODY_BYTES_MAX: Final = 16_384
# Waiting longer than this costs more than computing the prompt here.
PATIENCE: Final = timedelta(seconds=2)

logger = logging.getLogger(__name__)
Letter = Annotated[int, Meta(ge=0, le=28)]


class Order(msgspec.Struct):
    """Compute the KV of these tokens, and publish it under this id."""

    id: str
    tokens: Annotated[list[Letter], Meta(min_length=1, max_length=PROMPT_MAX)]


class Ask(msgspec.Struct):
    """The body of a request to ``/generate``."""

    prompt: Annotated[str, Meta(min_length=2, max_length=PROMPT_MAX)]
    new: Annotated[int, Meta(ge=1, le=NEW_MAX)] = 40


class Answer(msgspec.Struct):
    """The body of its answer: the text, and how many tokens' KV came from where."""

    text: str
    tokens_received: int
    tokens_computed: int


# --- prefill --------------------------------------------------------------------------


async def serve_prefill(listen: str) -> None:
    """Take orders from whoever connects."""
    model = ToyModel()
    async with kvwire.open(name="prefill") as comm, asyncio.TaskGroup() as tasks:
        print(f"prefill listens on {await comm.listen(listen)}", flush=True)
        async for conn in comm.connections():
            tasks.create_task(take_orders(comm, conn, model, tasks))


async def take_orders(
    comm: kvwire.Communicator,
    conn: kvwire.Connection,
    model: ToyModel,
    tasks: asyncio.TaskGroup,
) -> None:
    """Prefill what one peer asks for, until it goes."""
    with contextlib.suppress(kvwire.ConnectionClosed):
        while True:
            raw = bytes(await conn.recv(PROMPTS))
            try:
                order = msgspec.json.decode(raw, type=Order)
            except msgspec.MsgspecError as exc:
                logger.warning("%s sent no order: %s", conn.peer.name, exc)
            else:
                tasks.create_task(prefill(comm, model, order))


async def prefill(comm: kvwire.Communicator, model: ToyModel, order: Order) -> None:
    """Compute one prompt; its layers flow meanwhile."""
    tokens, blocks = order.tokens, blocks_for(len(order.tokens))
    pool = Pool(len(blocks))  # an engine has one pool, for all its requests
    try:
        out = comm.publish(order.id, pool.cache, blocks, tokens=len(tokens))
    except kvwire.UsageError as exc:
        logger.warning("order %r: %s", order.id, exc)
        return
    async with out:
        marks = LayerMarks(out, len(tokens), SPEC.block_tokens)
        await asyncio.to_thread(model.forward, tokens, pool, blocks, 0, marks)
    await out
    await out.drained()


# --- decode ---------------------------------------------------------------------------


async def serve_decode(prefill_address: str, http: str) -> None:
    """Answer HTTP requests."""
    host, _, port = http.rpartition(":")
    async with kvwire.open(name="decode") as comm:
        decoder = Decoder(comm, prefill_address)
        server = await asyncio.start_server(
            decoder.answer, host, int(port), limit=BODY_BYTES_MAX
        )
        async with server:
            bound = server.sockets[0].getsockname()
            print(f"decode answers on {bound[0]}:{bound[1]}", flush=True)
            await server.serve_forever()


class Decoder:
    """Generates text, with KV from a prefill process where there is one."""

    def __init__(self, comm: kvwire.Communicator, prefill_address: str) -> None:
        self._comm = comm
        self._address = prefill_address
        self._model = ToyModel()
        self._conn: kvwire.Connection | None = None
        self._numbers = itertools.count()

    async def generate(self, ask: Ask) -> Answer:
        """The continuation of a prompt."""
        prompt = tokens_of(ask.prompt)
        tokens = len(prompt) - 1
        blocks = blocks_for(len(prompt) + ask.new)
        pool = Pool(len(blocks))
        missing = [(0, tokens)]
        try:
            missing = await self._fetch(prompt[:-1], pool, blocks)
        except kvwire.KVWireError as exc:
            logger.warning("no KV from %s: %s", self._address, exc)
        for start, stop in missing:
            part = prompt[start:stop]
            await asyncio.to_thread(self._model.forward, part, pool, blocks, start)
        new = await asyncio.to_thread(self._model.decode, prompt, pool, blocks, ask.new)
        computed = sum(stop - start for start, stop in missing)
        return Answer(text_of(new), tokens - computed, computed)

    async def _fetch(
        self, tokens: list[int], pool: Pool, blocks: list[int]
    ) -> list[tuple[int, int]]:
        """Have a prompt prefilled, pull its KV; the token ranges that are missing."""
        if self._conn is None or self._conn.closed:
            self._conn = await self._comm.connect(self._address)
        order = Order(f"{self._comm.config.name}/{next(self._numbers)}", tokens)
        await self._conn.send(PROMPTS, msgspec.json.encode(order))
        filled = blocks[: len(blocks_for(len(tokens)))]
        inc = self._conn.pull(
            order.id, pool.cache, filled, tokens=len(tokens), deadline=PATIENCE
        )
        outcome = await inc
        await inc.drained()  # from here the blocks may also be written to
        request = kvwire.PrefillRequest(
            id=order.id,
            num_tokens=len(tokens),
            blocks=filled,
            block_tokens=SPEC.block_tokens,
        )
        plan = kvwire.plan_prefill([request], {order.id: outcome})
        return [(r.start, r.stop) for r in plan.prefill.get(order.id, ())]

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One HTTP request. A real server would use a library for this part."""
        try:
            ask = msgspec.json.decode(await read_post(reader), type=Ask)
            status, body = "200 OK", msgspec.json.encode(await self.generate(ask))
        except (ValueError, asyncio.IncompleteReadError, msgspec.MsgspecError) as exc:
            status, body = "400 Bad Request", msgspec.json.encode({"error": str(exc)})
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()


async def read_post(reader: asyncio.StreamReader) -> bytes:
    """The body of ``POST /generate``.

    Raises:
        ValueError: It is another request, or longer than is sensible.
    """
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as exc:
        raise ValueError("the header is too long") from exc
    first, *lines = head.split("\r\n")
    if not first.startswith("POST /generate "):
        raise ValueError("only POST /generate is served")
    fields = {k.lower(): v.strip() for k, _, v in (s.partition(":") for s in lines)}
    length = fields.get("content-length", "")
    if not (length.isdecimal() and len(length) < 9 and int(length) <= BODY_BYTES_MAX):
        raise ValueError(f"Content-Length: at most {BODY_BYTES_MAX}")
    return await reader.readexactly(int(length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("prefill").add_argument("--listen", default="127.0.0.1:7400")
    decode = roles.add_parser("decode")
    decode.add_argument("--prefill", default="127.0.0.1:7400")
    decode.add_argument("--http", default="127.0.0.1:8000")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        if options.role == "prefill":
            asyncio.run(serve_prefill(options.listen))
        else:
            asyncio.run(serve_decode(options.prefill, options.http))


if __name__ == "__main__":
    main()
