"""Which of several engines gets a request: a plug-in point, and two ways.

A policy of one's own is a class in any package, ``--route package.module:Class``.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import xxhash

from kvwire.errors import UsageError, nearest
from kvwire.integrations.vllm.proxy.engines import VllmEngine

# How the two engines of a request are asked.
AT_ONCE: Final = "at-once"
IN_SEQUENCE: Final = "in-sequence"
# Which engine is.
LEAST_LOADED: Final = "least-loaded"
BY_KV_EVENTS: Final = "kv-events"

# So much of a prompt decides where it goes: about what a system prompt begins with.
_PREFIX_TOKENS: Final = 256
_PREFIX_CHARS: Final = 1024


class Policy(ABC):
    """Chooses engines for requests. Each role has a policy object of its own."""

    @abstractmethod
    def choose(
        self, engines: Sequence[VllmEngine], body: Mapping[str, Any]
    ) -> VllmEngine:
        """Return one of the engines.

        Args:
            engines: Those that may be taken now, at least one; only to be read.
            body: What the client has asked. It may be anything that JSON can say.
        """

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what it holds; called once, after the last choice.

        Cancel safety: it may hold something still.
        """


class LeastLoaded(Policy):
    """Takes the engine with the fewest requests; of several, where the prompt was.

    That is the one of the highest weight for the prompt's beginning, so that a prompt
    comes to an engine that may have its prefix, and an engine that comes or goes moves
    few of them.
    """

    def choose(
        self, engines: Sequence[VllmEngine], body: Mapping[str, Any]
    ) -> VllmEngine:
        """Choose the engine with the fewest requests."""
        counts = [engine.requests for engine in engines]
        fewest = min(counts)
        best = [e for e, count in zip(engines, counts, strict=True) if count == fewest]
        return best[0] if len(best) == 1 else _heaviest(best, body)


# kv-events needs pyzmq, which is imported with it.
_KNOWN: Final[Mapping[str, str]] = {
    LEAST_LOADED: f"{__name__}:LeastLoaded",
    BY_KV_EVENTS: "kvwire.integrations.vllm.proxy.kv_events:ByKvEvents",
}


def make_policy(name: str) -> Policy:
    """Return a policy by its name, or by ``package.module:Class``."""
    module, colon, cls = _KNOWN.get(name, name).partition(":")
    if not colon:
        hint = nearest(name, _KNOWN)
        raise UsageError(f"route {name!r}; {hint}, or package.module:Class")
    try:
        made = getattr(importlib.import_module(module), cls)()
    # A plug-in may raise anything.
    except Exception as exc:
        if name in _KNOWN:
            raise
        raise UsageError(f"route {name!r}: {type(exc).__name__}: {exc}") from exc
    if not isinstance(made, Policy):
        raise UsageError(f"route {name!r}: it is no {Policy.__module__}.Policy")
    return made


def _heaviest(engines: Sequence[VllmEngine], body: Mapping[str, Any]) -> VllmEngine:
    """Return the engine of the highest weight: who comes or goes moves few prompts."""
    prefix = xxhash.xxh3_64_digest(_prefix(body).encode())
    return max(engines, key=lambda e: xxhash.xxh3_64_intdigest(prefix, e.seed))


def _prefix(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt", body.get("messages", ""))
    if isinstance(prompt, list):
        prompt = prompt[:_PREFIX_TOKENS]
    parts: list[str] = []
    chars = 0
    for value in _values(prompt):
        parts.append(value if isinstance(value, str) else repr(value))
        chars += 1 + len(parts[-1])
        if chars > _PREFIX_CHARS:
            break
    return ",".join(parts)[:_PREFIX_CHARS]


def _values(tree: Any) -> Iterator[Any]:
    """Yield what is in JSON from its beginning on; of a text, what may count of it."""
    if isinstance(tree, str):
        yield tree[:_PREFIX_CHARS]
    elif isinstance(tree, (list, dict)):
        yield ""  # so that those without a value in them come to an end as well
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _values(part)
    else:
        yield tree
