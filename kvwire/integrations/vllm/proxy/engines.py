"""The engines behind the proxy: which there are, which one is next, which are down."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from kvwire.errors import UsageError
from kvwire.types import Address

ROUND_ROBIN: Final = "round-robin"
BY_PREFIX: Final = "prefix"

# An engine that could not be reached gets no request for so long. A restart of vLLM
# takes longer, and a try costs a request no more than a refused connection.
DOWN_S: Final = 2.0
# So much of a prompt decides where it goes: about what a system prompt begins with.
_PREFIX_TOKENS: Final = 256
_PREFIX_CHARS: Final = 1024


@dataclass(frozen=True, slots=True)
class VllmServer:
    """Names one vLLM server.

    Attributes:
        url: Where it serves HTTP.
        remote: Where each of its ranks listens for KV, in rank order.
    """

    url: str
    remote: tuple[str, ...]


def parse_engine(text: str) -> VllmServer:
    """Read ``http://host:8100=host:7400,host:7401``.

    Raises:
        UsageError: It is not that.
    """
    url, separator, addresses = text.partition("=")
    remote = tuple(part.strip() for part in addresses.split(",") if part.strip())
    if not separator or not remote or urlsplit(url).scheme not in ("http", "https"):
        raise UsageError(
            f"engine {text!r}: write URL=KV[,KV...], such as "
            "http://127.0.0.1:8100=127.0.0.1:7400"
        )
    for address in remote:
        Address.parse(address)
    return VllmServer(url.rstrip("/"), remote)


class VllmServerPool:
    """Picks among engines of one kind.

    Args:
        engines: At least one.
        clock: Seconds, steadily increasing.
        route: Which engine gets a request.
    """

    def __init__(
        self,
        engines: Sequence[VllmServer],
        clock: Callable[[], float],
        route: str = ROUND_ROBIN,
    ) -> None:
        self._engines = tuple(engines)
        self._clock = clock
        self._route = route
        self._turns = itertools.count()
        self._down_until: dict[VllmServer, float] = {}

    def pick(
        self, body: dict[str, Any], tried: Collection[VllmServer]
    ) -> VllmServer | None:
        """Return the engine for a request.

        Args:
            body: The request.
            tried: Engines that have failed it.

        Returns:
            None if every engine has failed it. Engines that are down come last.
        """
        left = [engine for engine in self._engines if engine not in tried]
        up = [engine for engine in left if not self._is_down(engine)]
        choice = up or left
        if not choice:
            return None
        if self._route == BY_PREFIX:
            prefix = _prefix(body)
            return max(choice, key=lambda engine: _weight(engine, prefix))
        return choice[next(self._turns) % len(choice)]

    def down(self, engine: VllmServer) -> None:
        """Note that an engine could not be reached."""
        self._down_until[engine] = self._clock() + DOWN_S  # one entry an engine

    def _is_down(self, engine: VllmServer) -> bool:
        return self._down_until.get(engine, 0.0) > self._clock()


def _prefix(body: dict[str, Any]) -> str:
    prompt = body.get("prompt", body.get("messages", ""))
    if isinstance(prompt, str):
        return prompt[:_PREFIX_CHARS]
    if isinstance(prompt, list):
        prompt = prompt[:_PREFIX_TOKENS]
    return repr(prompt)[:_PREFIX_CHARS]  # what is no prompt an engine will refuse


def _weight(engine: VllmServer, prefix: str) -> bytes:
    """Weigh an engine for a key: highest-random-weight hashing moves little."""
    return hashlib.sha256(f"{engine.url}\0{prefix}".encode()).digest()
