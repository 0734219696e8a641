"""Assembles one whole answer from the events of a stream.

A request without ``stream`` can move too, because the engines answer the proxy with a
stream; only the client does not see one.
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
"""The content of a stream's event; its bytes if it is not a JSON object."""

AS_STREAM: Final = {"stream": True, "stream_options": {"include_usage": True}}
"""The fields that are added to the client's own fields for an engine."""

# Fields that arrive in pieces, whose characters or numbers are concatenated.
_TEXTS: Final = frozenset(
    ("text", "content", "reasoning", "reasoning_content", "refusal", "arguments")
)
_PIECES: Final = _TEXTS | {"token_ids"}
_OBJECTS: Final = {"chat.completion.chunk": "chat.completion"}

# Fields whose members arrive in pieces.
_NESTED: Final = frozenset(("delta", "function"))

# Fields of vLLM's whole answers that are left out of its events if they are empty.
_ANSWER: Final = dict.fromkeys(
    (
        "service_tier",
        "system_fingerprint",
        "kv_transfer_params",
        "ec_transfer_params",
        "metrics",
        "usage",
    )
)
_CHOICE: Final = dict.fromkeys(
    ("logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts")
)
# Fields that a completion has in its choice, and a chat beside its choices.
_PROMPT: Final = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
_MESSAGE: Final = dict.fromkeys(
    (
        "role",
        "content",
        "refusal",
        "annotations",
        "audio",
        "function_call",
        "tool_calls",
        "reasoning",
    )
)
_USAGE: Final = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))


async def in_one_piece(events: AsyncIterator[Event]) -> bytes:
    """Read a stream of one choice to its end; return it as one body.

    Cancel safety: safe, but the part already read is lost.

    Raises:
        EngineFailed: The stream broke off.
    """
    answer: dict[str, Any] = {}
    choice: dict[str, Any] = {}
    async for event in events:
        if isinstance(event, bytes):
            continue  # the end of the stream, or a comment
        with reading():
            for part in event.pop("choices", ()):
                _merge(choice, part)
            _merge(answer, event)
    if choice.get("finish_reason") is None:
        raise EngineFailed(None, "its answer is incomplete")
    with reading():
        return msgspec.json.encode(_whole(answer, _joined(choice)))


def _whole(answer: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """Assemble the answer from the merged events."""
    answer["object"] = _OBJECTS.get(answer.get("object", ""), answer.get("object"))
    if answer.get("usage"):
        answer["usage"] = _USAGE | answer["usage"]
    chosen = {"index": 0} | _CHOICE
    if (delta := choice.pop("delta", None)) is None:
        return _ANSWER | answer | {"choices": [chosen | _PROMPT | choice]}
    calls = list((delta.pop("tool_calls", None) or {}).values())
    for call in calls:
        del call["index"]  # it follows from their order
    message = _MESSAGE | {"role": "assistant"} | delta | {"tool_calls": calls}
    return (
        _ANSWER
        | _PROMPT
        | answer
        | {"choices": [chosen | choice | {"message": message}]}
    )


@contextmanager
def reading(engine: VllmEngine | None = None) -> Iterator[None]:
    """Raise EngineFailed for an event that lacks an expected field."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as exc:
        why = f"its answer is malformed: {type(exc).__name__}: {exc}"
        raise EngineFailed(engine, why) from None


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Append incremental fields; for all other fields the last value counts."""
    for name, value in part.items():
        # A chat's first event has a role and an empty text.
        if value is None or ("role" in part and value == ""):
            whole.setdefault(name, None)
        elif name == "tool_calls":
            calls = whole[name] = whole.get(name) or {}
            for call in value:
                # bounded: max_tokens, and so is what follows
                _merge(calls.setdefault(call["index"], {}), call)
        elif name in _NESTED:
            whole[name] = whole.get(name) or {}
            _merge(whole[name], value)
        elif name in _PIECES:
            whole[name] = whole.get(name) or []
            whole[name].extend(value)
        else:
            whole[name] = value


def _joined(whole: dict[str, Any]) -> dict[str, Any]:
    """Join the collected pieces of each text."""
    for name, value in whole.items():
        if value is None:
            continue
        if name in _TEXTS:
            whole[name] = "".join(value)
        elif name == "tool_calls":
            whole[name] = {index: _joined(call) for index, call in value.items()}
        elif name in _NESTED:
            _joined(value)
    return whole
