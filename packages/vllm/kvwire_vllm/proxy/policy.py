"""Which engine gets a request, among those that may."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import xxhash

from kvwire_vllm.proxy.engines import VllmEngine

Choose: TypeAlias = Callable[[Sequence[VllmEngine], Mapping[str, Any]], VllmEngine]

# How much of a prompt decides its engine: about the beginning of a system prompt.
_PREFIX_TOKENS: Final = 256
_PREFIX_CHARS: Final = 1024


def least_loaded(engines: Sequence[VllmEngine], body: Mapping[str, Any]) -> VllmEngine:
    """Return the engine with the fewest requests; among equals, by the prompt.

    Among equals the one with the highest weight for the prompt's beginning wins
    (rendezvous hashing). So a prompt returns to an engine that may cache its prefix,
    and an engine that comes or goes moves few prompts.

    Args:
        engines: The engines to choose from, at least one.
        body: The client's request, decoded from JSON and not checked.
    """
    counts = [engine.requests for engine in engines]
    fewest = min(counts)
    best = [e for e, count in zip(engines, counts, strict=True) if count == fewest]
    if len(best) == 1:
        return best[0]
    prefix = xxhash.xxh3_64_digest(_prefix(body).encode())
    return max(best, key=lambda e: xxhash.xxh3_64_intdigest(prefix, e.seed))


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
