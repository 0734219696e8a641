"""Goal R7: a connection cut at every byte of its handshake, {FIN, RST, silence}.

Each case judges both roles. The client gets one documented error within its deadline,
the server notes one outcome, and nothing is left of either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwire import Address, Communicator, ConnectionLost, HandshakeError
from kvwire.security.keys import write_key_file
from tests.support import inside
from tests.support.certificates import FAR, NEAR, Authority
from tests.support.depth import sample
from tests.support.pairs import communicators, until
from tests.support.proxy import Cut, Direction, Ending, Proxy

HANDSHAKE_S = 0.4
# For a machine that is busy with something else.
SLACK_S = 8.0
# Attempts at once, all on one loop: each has to be over within SLACK_S.
AT_ONCE = {Ending.FIN: 4, Ending.RST: 4, Ending.SILENCE: 8}
# Of TLS each cut costs two handshakes; between two of them nothing else happens.
STEPS = {Ending.FIN: 1, Ending.RST: 13, Ending.SILENCE: 13}
# Signatures of certificates with elliptic curves differ in length by a few bytes.
_LENGTH_VARIES = 24
# Errors that `connect` documents for a peer that goes away.
DOCUMENTED = (HandshakeError, ConnectionLost, OSError)


@pytest.fixture(params=["psk", pytest.param("mtls", marks=pytest.mark.matrix)])
async def sides(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[Communicator, Communicator]]:
    # Debug mode takes a traceback for every one of some 100,000 callbacks.
    asyncio.get_running_loop().set_debug(False)
    ca = Authority(tmp_path)
    near_trust, far_trust = ca.config(NEAR, FAR), ca.config(FAR, NEAR)
    if request.param == "psk":
        write_key_file(tmp_path / "key")
        near_trust = far_trust = {"trust": "psk", "psk_file": str(tmp_path / "key")}
    both: dict[str, Any] = {"handshake_timeout_s": HANDSHAKE_S, "prefer": ("tcp",)}
    async with communicators(near_trust, far_trust, **both) as made:
        yield made


async def handshake_bytes(near: Communicator, far: Address, way: Direction) -> int:
    """How long a whole handshake is in one direction."""
    async with Proxy(far) as proxy:
        connection = await near.connect(proxy.address)
        length = proxy.passed[way]
        await connection.close()
    return length


async def attempts(near: Communicator, far: Address, cuts: Iterator[Cut]) -> int:
    """Connect through each cut, one after the other; return the number of attempts."""
    made = 0
    for cut in cuts:
        made += 1
        # On a busy machine the time may be over before the bytes have come so far.
        while not await attempt(near, far, cut):
            made += 1
    return made


async def attempt(near: Communicator, far: Address, cut: Cut) -> bool:
    """Whether the cut was reached; there is an error either way."""
    async with Proxy(far, cut) as proxy, asyncio.timeout(HANDSHAKE_S + SLACK_S):
        try:
            await near.connect(proxy.address)
        except DOCUMENTED:
            return proxy.passed[cut.direction] == cut.at
        pytest.fail(f"{proxy}: connected all the same")


@pytest.mark.parametrize("ending", AT_ONCE)
@pytest.mark.parametrize("way", Direction)
async def test_every_byte(
    sides: tuple[Communicator, Communicator],
    way: Direction,
    ending: Ending,
    caplog: pytest.LogCaptureFixture,
) -> None:
    near, far = sides
    address = await far.listen("127.0.0.1:0")
    length = await handshake_bytes(near, address, way)
    await (await far.accept()).wait_closed()
    assert length > 256

    caplog.set_level(logging.INFO, "kvwire")
    places = list(sample(range(length), every=7))
    if near.config.trust == "mtls":
        places = list(range(0, length - _LENGTH_VARIES, STEPS[ending]))
    cuts = (Cut(way, at, ending) for at in places)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(attempts(near, address, cuts))
            for _ in range(AT_ONCE[ending])
        ]
    await until(lambda: not inside.drivers(near) and not inside.drivers(far))
    await until(lambda: not inside.accepting(far))

    # Of an attempt whose time is over too early, or that is cut before the first byte,
    # the server may hear nothing.
    certain = sum(place > 0 for place in places)
    made = sum(task.result() for task in tasks)
    assert len(places) - 1 <= certain <= len(caplog.records) <= made
    for comm in sides:
        assert not comm.live_connections
        assert len(inside.buffers(comm)) == 0
    # Where only the server's last words were cut, it had a connection; it has ended.
    while len(inside.reception(far).inbound):
        assert (await far.accept()).closed
