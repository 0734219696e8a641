"""Seeded bad networks under a whole workload: right bytes, or an error; never both.

Toxics of every kind between two communicators that send, put and get in both
directions. A failing seed prints its toxics.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from datetime import timedelta

import pytest

from kvwire import Communicator, Connection, KVWireError, Request
from kvwire_certify.oracle import content
from tests.support import inside
from tests.support.depth import parameters
from tests.support.pairs import communicators, until
from tests.support.proxy import Proxy, schedule

SEEDS = range(30)
# Of one direction: the handshake, small messages, and some chunks.
REACH_BYTES = 400_000
SIZES = (0, 1, 1000, 20_000, 90_000)
PATIENCE = timedelta(seconds=0.6)
# A connection, and whose it is.
End = tuple[Connection, Communicator]


async def message(
    sender: Connection, other: End, writer: int, number: int, nbytes: int
) -> None:
    receiver, _ = other
    into = bytearray(nbytes)
    received = receiver.recv(number, into, deadline=PATIENCE)
    sent = sender.send(number, content(nbytes, number, writer), deadline=PATIENCE)
    await over(sent)
    if await over(received):
        assert into == content(nbytes, number, writer)


async def one_sided(
    user: Connection, other: End, writer: int, number: int, nbytes: int
) -> None:
    memory, back = bytearray(nbytes), bytearray(nbytes)
    connection, owner = other
    region = owner.register(memory, "readwrite")
    try:
        grant = region.grant(connection)
        data = content(nbytes, number, writer)
        if await over(user.put(data, grant, deadline=PATIENCE)):
            assert memory == data
        if await over(user.get(grant, back, deadline=PATIENCE)):
            # A put that failed may have written some of its bytes.
            assert back == memory
    finally:
        await region.close()


async def over(request: Request[int]) -> bool:
    """Wait for the completion; whether it was a good one."""
    good = False
    with suppress(KVWireError):
        await request
        good = True
    await request.released()
    return good


async def work(left: End, right: End, rng: random.Random) -> None:
    jobs = []
    for number in range(12):
        (sender, receiver), writer = rng.choice(
            [((left, right), 1), ((right, left), 2)]
        )
        kind = rng.choice([message, one_sided])
        nbytes = max(rng.choice(SIZES), kind is one_sided)
        jobs.append(kind(sender[0], receiver, writer, number, nbytes))
    for result in await asyncio.gather(*jobs, return_exceptions=True):
        # What a call itself raises says that the connection had ended before.
        if result is not None and not isinstance(result, KVWireError):
            raise result


@pytest.mark.parametrize("seed", parameters(SEEDS, every=6))
async def test_a_bad_network(seed: int) -> None:
    asyncio.get_running_loop().set_debug(False)
    toxics = schedule(seed, reach_bytes=REACH_BYTES)
    async with (
        communicators(
            handshake_timeout_s=0.5, close_timeout_s=0.5, ping_interval_s=0.3
        ) as (near, far),
        Proxy(await far.listen("127.0.0.1:0"), *toxics, seed=seed) as proxy,
    ):
        print(proxy)
        with suppress(KVWireError, OSError):
            left = await near.connect(proxy.address)
            async with asyncio.timeout(30):
                right = await far.accept()
            await work((left, near), (right, far), random.Random(seed))
            await asyncio.gather(left.close(), right.close())
        await until(lambda: not inside.drivers(near))
        near.abort()
        far.abort()
    for comm in (near, far):
        await until(lambda comm=comm: not inside.drivers(comm))  # type: ignore[misc]
        assert len(inside.buffers(comm)) == 0
