"""One side of two hosts: a process in a network namespace, told what to do in lines.

``python -m tests.fault.host listen|connect ADDRESS KEY TRANSPORT``. Each line that it
reads is done and answered with one line: ``get`` moves bytes and compares them,
``dial`` connects again, ``end`` waits for the end of the connection, ``pull`` begins a
transfer that the listener publishes, of which one layer is there, and ``outcome`` waits
for its end. The listener marks the other layers after a line of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import kvwire
from kvwire import Communicator, Connection, ConnectionClosed, KVWireError
from kvwire_certify.oracle import content
from tests.support.caches import Memory

NBYTES = 4 << 20
_TAG = 1
_BLOCKS = 16
# What is moved; both sides know it.
CONTENT = content(NBYTES)


async def serve(comm: Communicator, address: str) -> None:
    """Grant the bytes to whoever connects, until nobody is there to tell it."""
    print(await comm.listen(address), flush=True)
    region = comm.register(CONTENT, "read")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publish(comm))
        async for connection in comm.connections():
            await connection.send(_TAG, region.grant(connection).to_bytes())


def kv_cache(value: int) -> kvwire.PagedCache:
    """A cache of four layers that are filled with a number."""
    spec = kvwire.KVSpec(
        layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="float16"
    )
    return Memory(spec, _BLOCKS, value).cache


async def publish(comm: Communicator) -> None:
    """Publish a cache, the first layer at once and the others when it is told to."""
    out = comm.publish("t", kv_cache(7), range(_BLOCKS))
    out.ready(layers=0)

    async def mark() -> None:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        with contextlib.suppress(KVWireError):
            out.ready(layers=slice(1, 4))
            out.finish()

    marking = asyncio.create_task(mark())
    print((await out).state, flush=True)
    await marking


async def fetch(connection: Connection, grant: kvwire.Grant) -> str:
    """Read the granted bytes; how that went."""
    into = bytearray(NBYTES)
    await connection.get(grant, into=into)
    return "equal" if into == CONTENT else "different"


async def obey(comm: Communicator, address: str, transports: list[str]) -> None:
    """Do what the lines say."""
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    connection: Connection | None = None
    pulled: kvwire.Incoming | None = None
    while line := (await lines.readline()).decode().strip():
        try:
            if line == "dial":
                connection = await comm.connect(
                    address, transport=transports or None, timeout_s=20
                )
                grant = kvwire.Grant.from_bytes(bytes(await connection.recv(_TAG)))
                answer = f"{connection.transport} | {connection.transport_report}"
            elif line == "pull":
                assert connection is not None
                pulled = connection.pull("t", kv_cache(0), range(_BLOCKS))
                await pulled.layer(0)
                answer = "one layer is here"
            elif line == "outcome":
                assert pulled is not None
                answer = (await pulled).state
            elif line == "get":
                assert connection is not None
                answer = await fetch(connection, grant)
            else:
                assert connection is not None
                began = loop.time()
                # Fails as soon as the end is known; transports may be quiet later.
                with contextlib.suppress(ConnectionClosed):
                    await connection.recv(_TAG + 1)
                answer = f"ended {loop.time() - began:.3f}"
        except (KVWireError, OSError) as exc:
            answer = f"{type(exc).__name__}: {exc}"
        print(answer, flush=True)


async def main(role: str, address: str, key: str, transports: str) -> None:
    """Be one side until stdin ends, or for ever."""
    # Two hosts share no memory, but two namespaces do, as UCX finds out.
    ucx = {"TLS": "tcp"}
    # Other tests have the loopback alone. The environment wins over settings.
    os.environ["UCX_NET_DEVICES"] = "all"
    config = kvwire.Config(trust="psk", psk_file=key, backends={"ucx": ucx})
    async with kvwire.open(config, name=role) as comm:
        if role == "listen":
            await serve(comm, address)
        else:
            await obey(comm, address, [t for t in transports.split(",") if t])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
