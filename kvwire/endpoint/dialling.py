"""Host names with several addresses: bind all of them, dial until one answers.

Only dialling shows which address of a name works: a host may have IPv4 and IPv6
addresses and listen on only one of them, or a cable may be unplugged. So the addresses
are dialled one after the other, without waiting for earlier attempts to fail, and the
first to answer is used (RFC 8305, "Happy Eyeballs"). Listening on a name binds each of
its addresses, with one port, because a peer may dial any of them first.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kvwire.backend import Backend, Link, Listener
from kvwire.backend.selection import crosses_hosts
from kvwire.errors import ConnectError, UsageError, not_looked_up
from kvwire.limits import DIAL_DELAY_S
from kvwire.security.keys import resolve
from kvwire.types import Address, TrustMode

# How many ports are tried: a port that is free at one address may be taken at another.
_PORTS_TRIED: Final = 8
# This host has no such address, or does not support the protocol family.
_NOT_OF_THIS_HOST: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Dialling:
    """Opens a link to one of the addresses of a name.

    Args:
        name: The address as the user wrote it.
        backend: Dials each of its addresses.
        trust: The trust mode, which decides which addresses may be dialled.
    """

    def __init__(self, name: Address, backend: Backend, trust: TrustMode) -> None:
        self._name = name
        self._backend = backend
        self._trust = trust
        self._addresses: list[Address] = []
        self._failures: dict[Address, OSError] = {}

    async def link(self) -> tuple[Address, Link]:
        """Return the first link to be established, and its address.

        Raises:
            UsageError: The name is malformed, or needs a trust mode.
            ConnectError: The name is unknown, or no address answers; the text gives a
                reason for each.

        Cancel safety: safe, half-made links are closed.
        """
        if not self._name.port and crosses_hosts(self._backend):
            raise UsageError(
                f"cannot connect to {self._name}: its port is 0, which only a listener "
                "may have; use the one of the address that the peer's listen returned"
            )
        try:
            found = await _addresses(self._name, self._backend, self._trust)
        except OSError as exc:
            raise self._error(str(exc.strerror or exc), exc.errno) from exc
        self._addresses = _interleaved(found)
        if len(found) > 1:
            return await self._race()
        (where,) = self._addresses
        try:
            return where, await self._backend.connect(where)
        except OSError as exc:
            self._failures[where] = exc
            raise self._refused() from exc

    async def _race(self) -> tuple[Address, Link]:
        waiting = list(reversed(self._addresses))
        attempts: dict[asyncio.Task[Link], Address] = {}
        pending: set[asyncio.Task[Link]] = set()
        try:
            while waiting or pending:
                if waiting:
                    where = waiting.pop()
                    task = asyncio.ensure_future(self._backend.connect(where))
                    attempts[task] = where
                    pending.add(task)
                done, pending = await asyncio.wait(
                    pending,
                    timeout=DIAL_DELAY_S if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    where = attempts[task]
                    try:
                        link = task.result()
                    except OSError as exc:
                        self._failures[where] = exc
                    else:
                        del attempts[task]
                        return where, link
            raise self._refused()
        finally:
            for task in attempts:
                task.add_done_callback(_abort_link)
                task.cancel()
            if pending:
                await asyncio.wait(pending)

    def late(self, timeout_s: float) -> ConnectError:
        """Return the error for a name whose addresses did not answer in time."""
        reasons = self._each(f"no answer within {timeout_s:g} s")
        if not self._addresses:
            reasons = not_looked_up(self._name.host, timeout_s)
        return self._error(reasons, errno.ETIMEDOUT)

    def _refused(self) -> ConnectError:
        first = next(iter(self._failures.values()))
        # The common reason, if all agree: "refused" means that nothing listens.
        same = len({failure.errno for failure in self._failures.values()}) == 1
        error = self._error(self._each(""), first.errno if same else errno.EHOSTUNREACH)
        error.__cause__ = first if same else None
        return error

    def _each(self, silent: str) -> str:
        """Return why each address failed; ``silent`` if it did not answer."""
        failures = self._failures
        reasons = [
            str(failures[address].strerror or failures[address])
            if address in failures
            else silent
            for address in self._addresses
        ]
        if len(reasons) < 2:
            return reasons[0] if reasons else silent
        pairs = zip(self._addresses, reasons, strict=True)
        return "; ".join(f"{address}: {reason}" for address, reason in pairs)

    def _error(self, reasons: str, number: int | None) -> ConnectError:
        text = f"cannot connect to {self._name}: {reasons}"
        return ConnectError(text, address=str(self._name), errno=number)


async def listen_on_all(
    name: Address,
    backend: Backend,
    trust: TrustMode,
    accept: Callable[[Link], None],
) -> list[Listener]:
    """Listen on every address of a name, all with one port.

    Addresses that do not belong to this host are skipped, if at least one does.

    Raises:
        UsageError: The name is malformed, or needs a trust mode.
        OSError: The name is unknown, one of its addresses is taken, or none belongs to
            this host.

    Cancel safety: safe, nothing stays bound.
    """
    addresses = await _addresses(name, backend, trust)
    for tried in itertools.count(1):
        listeners: list[Listener] = []
        try:
            await _listen_once(addresses, backend, accept, listeners)
        except BaseException as exc:
            for listener in listeners:
                await listener.close()
            any_port = listeners and not name.port
            taken = isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE
            if not (any_port and taken and tried < _PORTS_TRIED):
                raise
        else:
            break
    return listeners


async def _listen_once(
    addresses: Sequence[Address],
    backend: Backend,
    accept: Callable[[Link], None],
    listeners: list[Listener],
) -> None:
    missing: OSError | None = None
    for address in addresses:
        where = address
        if listeners:
            where = replace(address, port=listeners[0].address.port)
        try:
            listener = await backend.listen(where, accept)
        except OSError as exc:
            if exc.errno not in _NOT_OF_THIS_HOST:
                raise
            missing = exc
        else:
            listeners.append(listener)  # bounded: the addresses of one name
    if not listeners:
        assert missing is not None, "a name has at least one address"
        raise missing


async def _addresses(
    name: Address, backend: Backend, trust: TrustMode
) -> list[Address]:
    if crosses_hosts(backend):
        return await resolve(name, trust)
    return [name]


def _interleaved(addresses: Sequence[Address]) -> list[Address]:
    """Alternate IPv6 and IPv4, the first address's family first (RFC 8305, 4)."""
    first = ":" in addresses[0].host
    groups: tuple[list[Address], list[Address]] = ([], [])
    for address in addresses:
        groups[(":" in address.host) is not first].append(address)
    pairs = itertools.zip_longest(*groups)
    return [address for pair in pairs for address in pair if address is not None]


def _abort_link(task: asyncio.Task[Link]) -> None:
    """End a link that connected after another one was chosen."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()
