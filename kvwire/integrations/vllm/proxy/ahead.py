"""Copies prefixes to an engine before it gets requests for them.

A policy chooses prefixes and engines. To copy a prefix to an engine, the proxy requests
one token after the prefix from it. The engine then loads the prefix from a shared
store, fetches it from a prefill engine, or computes it, and from then on has it in its
own cache.

To use your own policy, register a subclass of :class:`AheadPolicy` under a name in the
entry-point group ``kvwire.copy_ahead``, and give the proxy ``--copy-ahead NAME``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from typing import Any, Final

from kvwire.errors import UsageError, nearest
from kvwire.extras import PlugInError, plug_in
from kvwire.integrations.vllm.proxy.limits import PROXY_PREFIXES_MAX
from kvwire.integrations.vllm.proxy.policy import prefix_digest

AHEAD_GROUP: Final = "kvwire.copy_ahead"
HOT_PREFIXES: Final = "hot-prefixes"

# A prefix is hot when the requests that had it add up to this. Each counts 1 at first,
# and half as much after each such time.
_HOT: Final = 3.5
_HALF_LIFE_S: Final = 60.0
# A prefix has at least a few blocks; otherwise a copy is not worth a request.
_SHARED_MIN: Final = 256
# How much of a prompt is kept for comparison with the next one: up to 64 Ki tokens.
_KEPT_MAX: Final = 65_536


class AheadPolicy(ABC):
    """Decides which prefixes to copy to another engine in advance."""

    @abstractmethod
    def answered(
        self, body: Mapping[str, Any], engine: str, now_s: float
    ) -> Mapping[str, Any] | None:
        """Return the prefix to copy, if any, once an engine has answered a request.

        Args:
            body: The client's request, decoded from JSON and not checked. Do not
                change it.
            engine: The URL of the engine.
            now_s: The time, in seconds.

        Returns:
            The body of a request with the prefix, ``prompt`` or ``messages``; or None.
        """


@dataclass(slots=True)
class _Prefix:
    """A prefix that several requests share."""

    count: float = 0.0
    since_s: float = 0.0
    copied: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)


class HotPrefixes(AheadPolicy):
    """Copies a prefix to a second engine after four requests within a short time.

    The shared prefix is found by comparing two of their prompts.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, _Prefix] = OrderedDict()

    def answered(
        self, body: Mapping[str, Any], engine: str, now_s: float
    ) -> Mapping[str, Any] | None:
        """Return the beginning of the prompt, if it is hot."""
        digest = prefix_digest(body)
        seen = self._seen.setdefault(digest, _Prefix(since_s=now_s))
        self._seen.move_to_end(digest)
        if len(self._seen) > PROXY_PREFIXES_MAX:
            self._seen.popitem(last=False)
        seen.count *= 0.5 ** ((now_s - seen.since_s) / _HALF_LIFE_S)
        seen.since_s = now_s
        seen.count += 1
        if seen.count < 1.5:
            seen.copied = False
        before = seen.body
        seen.body = _kept(body)
        if seen.copied or seen.count < _HOT:
            return None
        shared = shared_prompt(before, seen.body)
        if not shared:
            return None
        seen.copied = True
        return {**body, **shared}


def make_ahead(name: str) -> AheadPolicy:
    """Return the policy with this name among the entry points ``kvwire.copy_ahead``."""
    try:
        kind = plug_in(AHEAD_GROUP, name, AheadPolicy)
        if kind is None:
            hint = nearest(name, (HOT_PREFIXES,))
            raise UsageError(
                f"copy-ahead {name!r}; {hint}, or the name of an entry point in "
                f"{AHEAD_GROUP}"
            )
        made: AheadPolicy = kind()
    except PlugInError as exc:
        raise UsageError(f"copy-ahead {name!r}{exc}") from None
    return made


def shared_prompt(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the common beginning of two requests, if it is long enough."""
    for name in ("prompt", "messages"):
        mine = one.get(name)
        theirs = other.get(name)
        if not isinstance(mine, str | list) or not isinstance(theirs, type(mine)):
            continue
        same = sum(map(bool, takewhile(bool, map(eq, mine, theirs))))
        size = same if name == "prompt" else sum(len(repr(m)) for m in mine[:same])
        return {name: mine[:same]} if size >= _SHARED_MIN else None
    return None


def _kept(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a request that is kept for comparison with the next one."""
    return {
        name: value[:_KEPT_MAX]
        for name in ("prompt", "messages")
        if isinstance(value := body.get(name), str | list)
    }
