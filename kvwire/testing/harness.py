"""Two connected communicators in one line, over any backend, optionally with faults.

>>> async with kvwire.testing.loopback() as pair:
...     await pair.ab.send(7, b"hello")
...     assert await pair.ba.recv(7) == b"hello"
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import kvwire
from kvwire import Address, Communicator, Config, Connection, UsageError
from kvwire.backend import registry
from kvwire.testing.faults import FaultPlan, injected


@dataclass(frozen=True, slots=True)
class Loopback:
    """Two communicators in this process and the connection between them.

    Attributes:
        a: The communicator that connects.
        b: The communicator that listens.
        ab: The connection, from ``a``'s side.
        ba: The same connection, from ``b``'s side.
        address: The address on which ``b`` listens.
    """

    a: Communicator
    b: Communicator
    ab: Connection
    ba: Connection
    address: Address


@asynccontextmanager
async def loopback(
    backend: str = "inproc",
    *,
    faults: FaultPlan | None = None,
    config: Config | None = None,
    address: str | Address | None = None,
    **arguments: Any,
) -> AsyncIterator[Loopback]:
    """Open two communicators, named ``a`` and ``b``, and connect them.

    Both are closed at the end, or aborted if an exception left the block. With faults
    they are always aborted: a close would wait for frames that never arrive.

    Args:
        backend: The transport, such as ``"inproc"`` or ``"tcp"``.
        faults: Faults for the frames of both sides; ``inproc`` only. Set ``spare`` to
            let the handshake through.
        config: The configuration of both sides; None for the environment alone.
        address: The address to listen on. By default a free name for ``inproc``, and a
            free loopback port for every other backend. If a backend has no addresses of
            its own, the connection is made over tcp, and the backend carries the data.
        **arguments: Keys of Config that override ``config``, on both sides.

    Raises:
        UsageError: The backend does not support faults, or as for :func:`kvwire.open`.
        BackendUnavailable: The backend cannot run here.
        HandshakeError: The faults hit the handshake.

    Cancel safety: safe, both are closed.
    """
    if faults is not None and backend != "inproc":
        raise UsageError(
            f"loopback({backend!r}, faults=...): only inproc injects faults; use "
            "inproc, or leave faults out"
        )
    if address is None:
        links = registry.load(backend).capabilities.links
        scheme = backend if links else "tcp"
        address = "inproc://" if backend == "inproc" else f"{scheme}://127.0.0.1:0"
    async with (
        kvwire.open(config, **{"name": "a", **arguments}) as a,
        kvwire.open(config, **{"name": "b", **arguments}) as b,
    ):
        # Backends are created by the first listen and connect, and take the plan at
        # that moment.
        with injected(faults) if faults is not None else nullcontext():
            where = await b.listen(address)
            ab = await a.connect(where, transport=backend)
        ba = await anext(b.connections())
        try:
            yield Loopback(a, b, ab, ba, where)
        finally:
            if faults is not None:
                a.abort()
                b.abort()
