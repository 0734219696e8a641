"""The engines behind the proxy, and the state of each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import xxhash

from kvwire.errors import UsageError, without_password
from kvwire.types import Address
from kvwire_vllm.announce import BOTH

# An engine that failed a request gets no other one for this time, if another engine can
# answer. A restart of vLLM takes longer; after it, /health shows that the engine is
# back.
DOWN_S: Final = 2.0


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

    If a directory lists it, a restart makes a new object. One from the command line
    keeps its object, and forgets what it has reported.
    """

    server: VllmServer  # its addresses
    role: str  # its role: `"prefill"`, `"decode"` or `"both"`
    start: str = ""  # distinguishes restarts at the same place
    model: str = ""  # a fingerprint; only engines with equal ones exchange KV
    load: float = 0.0  # the load it reports: 0 is idle, 1 is full
    slots: int = 0  # how many requests it computes at once; 0 if unknown
    # Its other labels, for policies and for people.
    labels: dict[str, str] = field(default_factory=dict)
    transports: tuple[str, ...] = ()  # transports that can carry KV there
    listed: bool = True  # whether the directory, or the command line, lists it
    ready: bool = True  # whether it has answered, or is on the command line
    draining: bool = False  # whether an operator has stopped new requests to it
    gone: bool = False  # whether nothing listens there, or it did not answer for long
    slow: bool = False  # whether its health check is late
    # Until then, another engine that can answer is preferred.
    down_until: float = float("-inf")
    running: int = 0  # its running requests from this proxy
    answered: int = 0  # requests it has answered
    failed: int = 0  # requests it has failed
    seed: int = field(init=False)  # a hash of its URL, for rendezvous hashing
    _waits: set[asyncio.Timeout] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.seed = xxhash.xxh3_64_intdigest(self.server.url.encode())

    @property
    def url(self) -> str:
        """The URL at which it serves HTTP."""
        return self.server.url

    @property
    def requests(self) -> float:
        """Its running requests: this proxy's, or its own count if that is higher."""
        announced = round(self.load * (self.slots or 1)) if self.load else 0
        return max(self.running, announced)

    def does(self, role: str) -> bool:
        """Return whether it has a role."""
        return self.role in (role, BOTH)

    def takes(self, role: str) -> bool:
        """Return whether it has a role and accepts new requests for it."""
        there = self.listed and self.ready and not self.draining
        return there and self.does(role)

    def is_down(self, now: float) -> bool:
        """Return whether it is known to be unreachable."""
        return self.gone or self.down_until > now

    def is_up(self, now: float) -> bool:
        """Return whether it is neither slow nor down."""
        return not (self.slow or self.is_down(now))

    def state(self, now: float) -> str:
        """Return the name of the engine's state."""
        if not self.ready:
            return "starting"
        if self.is_down(now):
            return "down"
        if self.draining or not self.listed:
            return "draining"
        return "slow" if self.slow else "up"

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
