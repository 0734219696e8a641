"""Routing policies, which choose the engine for a request.

To use your own, write a class in any package: ``--route package.module:Class``.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import xxhash

from kvwire.errors import UsageError, nearest
from kvwire.integrations.vllm.proxy.engines import VllmEngine

# The orders in which a request is sent to its two engines.
AT_ONCE: Final = "at-once"
IN_SEQUENCE: Final = "in-sequence"
# Names of policies.
LEAST_LOADED: Final = "least-loaded"
BY_KV_EVENTS: Final = "kv-events"

# How much of a prompt decides its engine: about the beginning of a system prompt.
_PREFIX_TOKENS: Final = 256
_PREFIX_CHARS: Final = 1024


class Policy(ABC):
    """Chooses engines for requests. Each role has its own policy object."""

    @abstractmethod
    def choose(
        self, engines: Sequence[VllmEngine], body: Mapping[str, Any]
    ) -> VllmEngine:
        """Return one of the engines.

        Args:
            engines: The engines to choose from, at least one. Do not change the list.
            body: The client's request, decoded from JSON and not checked.
        """

    def holders(
        self, engines: Sequence[VllmEngine], tokens: Sequence[int]
    ) -> Mapping[str, int]:
        """Return by URL the number of leading tokens that each engine caches."""
        return {}

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release its resources; called once, after the last choice.

        Cancel safety: some resources may stay open.
        """


class LeastLoaded(Policy):
    """Chooses the engine with the fewest requests; among equals, by the prompt.

    Among equals the one with the highest weight for the prompt's beginning wins
    (rendezvous hashing). So a prompt returns to an engine that may cache its prefix,
    and an engine that comes or goes moves few prompts.
    """

    def choose(
        self, engines: Sequence[VllmEngine], body: Mapping[str, Any]
    ) -> VllmEngine:
        """Choose the engine with the fewest requests."""
        counts = [engine.requests for engine in engines]
        fewest = min(counts)
        best = [e for e, count in zip(engines, counts, strict=True) if count == fewest]
        return best[0] if len(best) == 1 else _heaviest(best, body)


# Imported when used, since kv-events needs pyzmq.
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
        raise UsageError(f"route {name!r}: it is not a {Policy.__module__}.Policy")
    return made


def _heaviest(engines: Sequence[VllmEngine], body: Mapping[str, Any]) -> VllmEngine:
    """Return the engine with the highest weight for the prompt's prefix."""
    prefix = prefix_digest(body)
    return max(engines, key=lambda e: xxhash.xxh3_64_intdigest(prefix, e.seed))


def prefix_digest(body: Mapping[str, Any]) -> bytes:
    """Return a name for the beginning of a request's prompt."""
    return xxhash.xxh3_64_digest(_prefix(body).encode())


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
    """Yield the scalar values in JSON, in order; texts are cut to their beginning."""
    if isinstance(tree, str):
        yield tree[:_PREFIX_CHARS]
    elif isinstance(tree, (list, dict)):
        yield ""  # so that the end of a container without values is noticed too
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _values(part)
    else:
        yield tree
