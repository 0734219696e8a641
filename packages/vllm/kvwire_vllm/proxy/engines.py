"""The engines behind the proxy, and the state of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from kvwire.errors import UsageError, without_password
from kvwire.types import Address
from kvwire_vllm.announce import BOTH

logger: logging.Logger = logging.getLogger("kvwire.vllm")


@dataclass(frozen=True, slots=True)
class VllmServer:
    """The addresses of one vLLM server."""

    url: str  # URL of its HTTP server
    # Addresses of its ranks' KV listeners, stage by stage, in rank order.
    remote: tuple[str, ...]
    stages: int = 1  # the number of its pipeline stages


def parse_engine(text: str) -> VllmServer:
    """Parse ``http://host:8100=host:7400,host:7401,stages=2``."""
    url, separator, rest = text.partition("=")
    addresses, _, stages = rest.partition(",stages=")
    remote = tuple(part.strip() for part in addresses.split(",") if part.strip())
    ports = [Address.parse(address).port for address in remote]
    if not separator or not ports or not all(ports) or not _is_url(url):
        raise UsageError(
            f"engine {without_password(text)!r}: write URL=KV[,KV...][,stages=N], such "
            "as http://127.0.0.1:8100=127.0.0.1:7400"
        )
    count = int(stages or 1) if (stages or "1").isdecimal() else 0
    if not count or len(remote) % count:
        raise UsageError(
            f"engine {text!r}: {len(remote)} addresses cannot be divided among "
            f"{stages!r} pipeline stages"
        )
    return VllmServer(url.rstrip("/"), remote, count)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        where = parts.hostname and parts.port != 0
    except ValueError:
        return False
    # Anybody can read engines' URLs from /fleet, so they must not contain a password.
    more = parts.query or parts.fragment or parts.username is not None
    return parts.scheme in ("http", "https") and bool(where) and not more


@dataclass(eq=False, slots=True, kw_only=True)
class VllmEngine:
    """The state of one engine.

    ::

        state      begins when                         ends when
        starting   a directory lists it                /health answers
        down       nothing listens there, /health      /health answers
                   fails, or is silent for 10 s
        slow       /health is late, or it has no room  /health answers
        draining   an operator drains it               it was restarted, or the operator
                                                       ends that
        leaving    no directory lists it any more      its requests have ended

    If a directory lists an engine, a restart makes a new object. An engine from the
    command line keeps its object: it was restarted if nothing listened there and
    /health answers again.
    """

    server: VllmServer  # its addresses
    role: str  # its role: `"prefill"`, `"decode"` or `"both"`
    start: str = ""  # distinguishes restarts at the same place
    model: str = ""  # a fingerprint; only engines with equal ones exchange KV
    load: float = 0.0  # the load it reports: 0 is idle, 1 is full
    slots: int = 0  # how many requests it computes at once; 0 if unknown
    labels: dict[str, str] = field(default_factory=dict)  # its other labels
    transports: tuple[str, ...] = ()  # transports that can carry KV there
    listed: bool = True  # whether the directory, or the command line, lists it
    ready: bool = True  # whether it has answered, or is on the command line
    draining: bool = False  # whether an operator has stopped new requests to it
    slow: bool = False  # whether its health check is late, or it had no room
    down: str = ""  # why it is down; "" if it is up
    running: int = 0  # its running requests from this proxy
    answered: int = 0  # requests it has answered
    failed: int = 0  # requests it has failed
    picked: int = 0  # the number of its last request among the fleet's
    _left: bool = False  # whether nothing has listened there since the drain began
    _waits: set[asyncio.Timeout] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """The URL at which it serves HTTP."""
        return self.server.url

    @property
    def requests(self) -> float:
        """Its running requests: this proxy's, or its own count if that is higher."""
        announced = round(self.load * (self.slots or 1)) if self.load else 0
        return max(self.running, announced)

    @property
    def is_up(self) -> bool:
        """Whether it is neither slow nor down."""
        return not (self.slow or self.down)

    @property
    def state(self) -> str:
        """The name of its state."""
        return self._state()[0]

    @property
    def waits_for(self) -> str:
        """The event before which it gets no requests; "" if it gets them."""
        return self._state()[1]

    def _state(self) -> tuple[str, str]:
        if not self.listed:
            return "leaving", "a new record in the directory"
        if self.draining:
            return "draining", _RESTART
        if self.down:
            return "down", f"an answer to /health: {self.down}"
        if not self.ready:
            return "starting", "its first answer to /health"
        return ("slow" if self.slow else "up"), ""

    def does(self, role: str) -> bool:
        """Return whether it has a role."""
        return self.role in (role, BOTH)

    def takes(self, role: str) -> bool:
        """Return whether it has a role and accepts new requests for it."""
        there = self.listed and self.ready and not self.draining
        return there and self.does(role)

    # --- its health -------------------------------------------------------------------

    def drain(self, *, draining: bool = True) -> None:
        """Stop new requests to it, or end that."""
        self.draining = draining
        self._left = False

    def healthy(self) -> None:
        """Record that ``/health`` has answered."""
        if self.draining and self._left:
            logger.info("%s was restarted: it gets requests again", self.url)
            self.drain(draining=False)
        self.ready = True
        self.slow = False
        self.down = ""

    def lost(self, why: str, *, left: bool = False) -> None:
        """Record that it is down, and `left` if nothing listens there."""
        if not self.down:
            logger.warning("%s is down: %s", self.url, why)
        self.down = why
        self._left = self._left or left

    # --- its requests -----------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count a request as running until the block ends."""
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            self.answered += 1
            if not self.running:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until this proxy has no running request there.

        Cancel safety: safe, it only waits.
        """
        while self.running:
            await self._idle.wait()

    @contextmanager
    def waited_for(self, wait: asyncio.Timeout) -> Iterator[None]:
        """End a timeout early if the prober gives up on the engine."""
        self._waits.add(wait)  # bounded: PROXY_RUNNING_MAX
        try:
            yield
        finally:
            self._waits.discard(wait)

    def give_up(self) -> None:
        """Cancel all waits for its answers, since it no longer responds."""
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)


_RESTART: Final = 'its restart, or POST /drain with "drain": false'
