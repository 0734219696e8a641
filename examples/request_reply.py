"""Requests and replies as two-sided messages, with cancellation.

    python examples/request_reply.py

Each request names the tag of its reply, so many can run at the same time, and replies
arrive in any order. A client that gives up notifies the server, and drops a reply that
still arrives.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

import msgspec

import kvwire

REQUESTS: Final = 1
CANCELS: Final = 2
FIRST_REPLY: Final = 1000


class Ask(msgspec.Struct):
    """A request whose reply is expected on the tag ``reply``."""

    reply: int
    text: str


class Client:
    """Sends requests to one server; many may run at the same time."""

    def __init__(self, connection: kvwire.Connection) -> None:
        self._connection = connection
        self._tags = itertools.count(FIRST_REPLY)

    async def ask(self, text: str) -> str:
        """Send a request, and return the reply.

        Cancel safety: the server is notified, and a reply that still arrives is
        dropped.
        """
        reply = next(self._tags)
        await self._connection.send(REQUESTS, msgspec.msgpack.encode(Ask(reply, text)))
        try:
            return (await self._connection.recv(reply)).decode()
        except asyncio.CancelledError:
            self._connection.send(CANCELS, reply.to_bytes(8, "little"))
            self._connection.discard(reply)
            raise


async def serve(connection: kvwire.Connection) -> None:
    """Answer one client until its connection ends."""
    working: dict[int, asyncio.Task[None]] = {}

    async def answer(ask: Ask) -> None:
        try:
            await asyncio.sleep(len(ask.text) / 1000)  # stands for the work
            await connection.send(ask.reply, ask.text.upper().encode())
        except kvwire.PeerCancelled:
            pass  # the client has given up, and discards the reply
        finally:
            del working[ask.reply]

    async def cancels() -> None:
        while True:
            tag = int.from_bytes(await connection.recv(CANCELS), "little")
            if task := working.get(tag):
                task.cancel()
                print(f"the server stopped working on {tag}", flush=True)

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cancels())
            while True:
                raw = await connection.recv(REQUESTS)
                ask = msgspec.msgpack.decode(raw, type=Ask)
                working[ask.reply] = tasks.create_task(answer(ask))
    except* kvwire.ConnectionClosed:
        pass


async def main() -> None:
    """Send two requests, and give up a third."""
    async with kvwire.open(name="client") as near, kvwire.open(name="server") as far:
        connection = await near.connect(await far.listen("127.0.0.1:0"))
        serving = asyncio.create_task(serve(await far.accept()))
        client = Client(connection)
        print(await asyncio.gather(client.ask("hello"), client.ask("again")))
        try:
            async with asyncio.timeout(0.2):
                await client.ask("slow " * 1000)
        except TimeoutError:
            print("the client gave up")
        print(await client.ask("and goes on"))
        await connection.close()
        await serving


if __name__ == "__main__":
    asyncio.run(main())
