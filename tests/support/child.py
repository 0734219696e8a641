"""A peer in a process of its own, which a test can kill, stop and continue.

It connects, grants memory of its own, says what it makes of the transports, and
receives until the connection ends. The last line it prints is how that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import struct
import sys
from collections.abc import AsyncIterator
from typing import Any

import kvwire
from kvwire import Communicator, Connection, Grant, KVWireError
from kvwire_certify.conformance.content import pattern
from tests.support.runs import Beside, beside

GRANTED_BYTES = 32 << 20
REPORT_TAG = 3
_CAPABILITIES_3 = 0x20080522
_PR_SET_DUMPABLE = 4


def granted() -> bytes:
    """What is in the memory that it grants."""
    return pattern(1, GRANTED_BYTES).tobytes()


class Child(Beside):
    """The parent's side of it."""

    connection: Connection
    grant: Grant


@contextlib.asynccontextmanager
async def child(comm: Communicator, *, hidden: bool = False) -> AsyncIterator[Child]:
    """Start a peer that connects to a communicator, with the same configuration.

    Where it is hidden, one of the two processes cannot read the other's memory.
    """
    address = await comm.listen("127.0.0.1:0")
    config: dict[str, Any] = {
        "ping_interval_s": comm.config.ping_interval_s,
        "ping_misses": comm.config.ping_misses,
        "require": comm.config.require,
        "backends": dict(comm.config.backends),
    }
    arguments = ("-m", __name__, str(address), json.dumps(config))
    hiding = ["hidden"] if hidden else []
    async with beside(*arguments, *hiding, kind=Child) as made:
        made.connection = await comm.accept()
        made.grant = Grant.from_bytes(await made.connection.recv(1))
        yield made


async def _main(address: str, config: dict[str, Any], *, hidden: bool) -> None:
    if "nixl" in config["require"]:
        _load_nixl()
    async with kvwire.open(name="child", **config) as comm:
        if hidden:
            _hide()
        region = comm.register(bytearray(granted()), "readwrite")
        connection = await comm.connect(address)
        await connection.send(1, region.grant(connection).to_bytes())
        await connection.send(REPORT_TAG, str(connection.transport_report).encode())
        try:
            while True:
                await connection.recv(1)
        except KVWireError as exc:
            print(type(exc).__name__)


def _hide() -> None:
    """Make that one of the two processes may not read the other."""
    libc = ctypes.CDLL(None)
    if os.getuid() == 0:
        # Without capabilities it may not read a process that has some.
        done = libc.capset(struct.pack("Ii", _CAPABILITIES_3, 0), bytes(24))
    else:
        done = libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    assert done == 0


def _load_nixl() -> None:
    from kvwire_nixl.library import NixlAgent
    from kvwire_nixl.settings import parse
    from kvwire_ucx.library import MACHINE, answer

    # Another UCX is in the process, as behind any look at all transports; NIXL must not
    # call that in the place of its own.
    answer(MACHINE)
    # Its first agent takes a process longer than a lane may on a busy machine.
    NixlAgent(parse({}), "first").close()


if __name__ == "__main__":
    asyncio.run(
        _main(sys.argv[1], json.loads(sys.argv[2]), hidden="hidden" in sys.argv)
    )
