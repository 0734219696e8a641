"""An answer in one piece, made of the events of a stream.

A request without ``stream`` can move as well, because between the engines and the proxy
it is a stream: only its client sees none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from kvwire.integrations.vllm.proxy.client import EngineFailed

if TYPE_CHECKING:
    from kvwire.integrations.vllm.proxy.engines import VllmEngine

Event: TypeAlias = dict[str, Any] | bytes
"""What an event of a stream says; the bytes of one that is no object of JSON."""

AS_STREAM: Final = {"stream": True, "stream_options": {"include_usage": True}}
"""What is asked of an engine beside the client's own fields."""

# Characters of texts, and numbers.
_TEXTS: Final = frozenset(("text", "content", "reasoning", "reasoning_content"))
_PIECES: Final = _TEXTS | {"token_ids"}
_OBJECTS: Final = {"chat.completion.chunk": "chat.completion"}


async def in_one_piece(events: AsyncIterator[Event]) -> bytes:
    """Read a stream of one choice to its end; return what it says as one body.

    Cancel safety: safe, what was read is lost.

    Raises:
        EngineFailed: The stream broke off.
    """
    said: dict[str, Any] = {}
    choice: dict[str, Any] = {"index": 0, "logprobs": None}
    async for event in events:
        if isinstance(event, bytes):
            continue  # the end of the stream, or a comment
        with reading():
            for part in event.pop("choices", ()):
                delta = part.pop("delta", None)
                if delta is not None:
                    _merge(choice.setdefault("message", {"role": "assistant"}), delta)
                _merge(choice, part)
            _merge(said, event)
    if choice.get("finish_reason") is None:
        raise EngineFailed(None, "its answer has no end")
    with reading():
        for whole in (choice, choice.get("message", {})):
            whole.update({name: "".join(whole[name]) for name in _TEXTS & whole.keys()})
        said["object"] = _OBJECTS.get(said.get("object", ""), said.get("object"))
    return msgspec.json.encode(said | {"choices": [choice]})


@contextmanager
def reading(engine: VllmEngine | None = None) -> Iterator[None]:
    """Raise EngineFailed for an event that has not what such an event has."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as exc:
        why = f"its answer is none: {type(exc).__name__}: {exc}"
        raise EngineFailed(engine, why) from None


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add to what comes piece by piece; of everything else the last word counts."""
    for name, value in part.items():
        if name in _PIECES:
            whole.setdefault(name, []).extend(value or ())  # bounded: max_tokens
        elif value is not None or name not in whole:
            whole[name] = value
