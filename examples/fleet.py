"""A fleet whose members find each other in Redis: workers join, leave and are killed.

    pip install redis
    redis-server --port 6400
    python examples/fleet.py worker redis://127.0.0.1:6400    # as many as you like
    python examples/fleet.py client redis://127.0.0.1:6400

Type prompts into the client. Each prompt goes to the least busy worker; if a worker is
killed, the client computes the missing part. Other directories than Redis work as well.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import sys
import uuid
from typing import Annotated

import msgspec

import kvwire
from toy_model import Pool, ToyModel, blocks_for, text_of, tokens_of

ORDERS = 1  # the tag of messages that contain orders
SLOTS = 4  # the number of prompts that keep a worker busy
NEW = 24
model = ToyModel()
sent = collections.Counter[str]()  # unfinished orders, by worker


class Order(msgspec.Struct):
    """Compute the KV of these letters, and publish it under this id."""

    id: str
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=900)]


async def work(comm: kvwire.Communicator, order: Order) -> None:
    """Compute one prompt; each layer is sent as soon as it is computed."""
    tokens = tokens_of(order.text)
    blocks = blocks_for(len(tokens))
    pool = Pool(len(blocks))
    async with comm.publish(order.id, pool.cache, blocks, tokens=len(tokens)) as out:
        comm.announce(role="prefill", load=comm.open_transfers / SLOTS)

        def on_written(layer: int, start: int, stop: int) -> None:
            out.ready(layers=layer)

        await asyncio.to_thread(model.forward, tokens, pool, blocks, 0, on_written)
    await out
    await out.drained()
    comm.announce(role="prefill", load=comm.open_transfers / SLOTS)


async def take(comm: kvwire.Communicator, connection: kvwire.Connection) -> None:
    """Carry out one client's orders, until the client leaves."""
    async with asyncio.TaskGroup() as tasks:
        with contextlib.suppress(kvwire.ConnectionClosed):
            while True:
                raw = await connection.recv(ORDERS)
                order = msgspec.json.decode(raw, type=Order)
                tasks.create_task(work(comm, order))


async def worker(directory: str) -> None:
    """Announce this worker in the directory, and serve each client that connects."""
    name = f"worker-{os.getpid()}"
    async with kvwire.open(name=name, directory=directory) as comm:
        await comm.listen("127.0.0.1:0")
        comm.announce(role="prefill")
        print(f"{name} waits for orders", flush=True)
        async with asyncio.TaskGroup() as tasks:
            async for connection in comm.connections():
                tasks.create_task(take(comm, connection))


async def answer(comm: kvwire.Communicator, text: str) -> None:
    """Print a prompt's continuation; a worker computes the KV of all but one letter."""
    prompt = tokens_of(text)
    blocks = blocks_for(len(text) + NEW)
    pool = Pool(len(blocks))
    wanted = len(text) - 1
    known = 0
    name = "nobody"
    if members := await comm.members("role=prefill"):
        # A worker's load is as old as its record, so this client's own orders count
        # too.
        member = min(members, key=lambda one: max(one.load, sent[one.key] / SLOTS))
        sent[member.key] += 1
        peer = comm.peer(member)
        order = Order(uuid.uuid4().hex, text[:-1])
        filled = blocks[: len(blocks_for(wanted))]
        async with peer.pull(
            order.id, pool.cache, filled, tokens=wanted, deadline=30.0
        ) as incoming:
            with contextlib.suppress(kvwire.KVWireError):  # the outcome has the reason
                await peer.send(ORDERS, msgspec.json.encode(order))
            outcome = await incoming
        # after a failure, other workers are preferred
        sent[member.key] -= outcome.complete
        known = outcome.usable_tokens
        name = member.name
    new = await asyncio.to_thread(model.answer, prompt, pool, blocks, NEW, known)
    print(f"{text_of(new)!r}: {known} of {wanted} tokens from {name}", flush=True)


async def client(directory: str) -> None:
    """Answer each line of standard input; lines are answered concurrently."""
    async with kvwire.open(directory=directory) as comm, asyncio.TaskGroup() as tasks:
        while line := await asyncio.to_thread(sys.stdin.readline):
            tasks.create_task(answer(comm, line.strip()))


if __name__ == "__main__":
    match sys.argv[1:]:
        case [("worker" | "client") as role, url]:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run({"worker": worker, "client": client}[role](url))
        case _:
            sys.exit(__doc__)
