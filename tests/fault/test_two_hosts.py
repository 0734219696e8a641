"""Two hosts: network namespaces joined by a wire of limited rate, which is cut.

What can run between them is chosen, a cut is known within the 6.5 s that liveness
promises, and once the wire heals the next connection works. Needs root, ``ip`` and
``tc``; both sides are processes of one machine, so ``local`` must notice by itself that
it has no way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from kvwire.backend import registry
from kvwire.limits import PING_INTERVAL_S, PING_MISSES, RESTART_GRACE_S
from kvwire.security.keys import write_key_file
from tests.support.depth import parameters
from tests.support.hosts import Wire, two_hosts
from tests.support.runs import Beside, beside

_ROOT = Path(__file__).resolve().parents[2]
_PORT = 7400
# Three pings, and the looks at the clock between them; the promise.
KNOWN_WITHIN_S = 6.5
# For the answers themselves, on a machine that is busy.
PATIENCE_S = 40.0

assert PING_INTERVAL_S * PING_MISSES < KNOWN_WITHIN_S


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Two hosts joined by 1 Gbit/s."""
    with two_hosts(_PORT) as joined:
        yield joined


class Host(Beside):
    """One process in a namespace."""

    async def dials(self) -> str:
        """Connect once the hosts find each other again; what was chosen.

        A wire that has just healed is unreachable until their addresses are resolved.
        """
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await self.do("dial")).startswith("ConnectError"):
                pass
        return answer


@contextlib.asynccontextmanager
async def hosts(
    wire: Wire, key: Path, transports: str
) -> AsyncIterator[tuple[Host, Host]]:
    """A listener on the left, and on the right who connects; each takes lines."""
    environment = {k: v for k, v in os.environ.items() if k != "KVWIRE_PREFER"}
    words = ("-m", "tests.fault.host")
    more = (wire.address, str(key), transports)

    def host(namespace: str, role: str) -> AbstractAsyncContextManager[Host]:
        under = ("ip", "netns", "exec", namespace)
        return beside(
            *(*words, role, *more), kind=Host, reads=True, under=under, env=environment
        )

    async with host(wire.left, "listen") as left:
        assert str(_PORT) in await left.line()
        async with host(wire.right, "connect") as right:
            yield left, right


@pytest.mark.parametrize("transport", parameters(["", "tcp", "ucx"], every=3))
async def test_a_cut_is_known_and_the_next_connection_works(
    wire: Wire, tmp_path: Path, transport: str
) -> None:
    found = registry.availability(transport or "tcp")
    if not found.available:
        pytest.skip(f"{transport}: {found.reason}")
    write_key_file(tmp_path / "key")
    async with hosts(wire, tmp_path / "key", transport) as (_, right):
        taken = await right.dials()
        assert taken.startswith(transport or "tcp")
        if not transport:
            assert "local: refused" in taken
        assert await right.do("get") == "equal"

        wire.up(whole=False)
        ended = await right.do("end")
        assert ended.startswith("ended")
        assert float(ended.split()[1]) <= KNOWN_WITHIN_S  # the promise, not a rate

        wire.up(whole=True)
        assert (await right.dials()).startswith(transport or "tcp")
        assert await right.do("get") == "equal"


async def test_an_outage_of_one_direction_loses_no_transfer(
    wire: Wire, tmp_path: Path
) -> None:
    """The right gives up what it does not hear; the left hears its reset."""
    write_key_file(tmp_path / "key")
    async with hosts(wire, tmp_path / "key", "tcp") as (left, right):
        await right.dials()
        assert await right.do("pull") == "one layer is here"
        wire.one_way(whole=False)
        ended = await right.do("end")
        assert float(ended.split()[1]) <= KNOWN_WITHIN_S
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * RESTART_GRACE_S):
                await left.line()
        wire.one_way(whole=True)
        assert await left.do("the rest") == "complete"
        assert await right.do("outcome") == "complete"
