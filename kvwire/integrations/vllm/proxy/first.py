"""Streams that begin with prefill's first token and continue with decode's tokens.

::

    prefill's answer   its one token begins the stream, at once
    decode's stream    begins with the same token: only the rest of it is passed on
                       begins with another one: moving.py continues after the token that
                       the client has

Decode gets the client's whole request. It computes the last token of the prompt itself,
so it also has a first token, which is compared with prefill's. Apart from that its
stream needs no change: stop strings, half characters, the state of a seed and token
counts are decode's own.

Two engines sample the same token only with the same seed. So a request without a seed
gets a random one, if prefill accepts seeds.

The beginning has the form of this decode engine's events: for each kind of request, the
proxy keeps the first events that it has seen, and fills them in. Before that, and if an
engine returns parsed content and not only text, decode begins the stream.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvwire.integrations.vllm.proxy.client import EngineFailed, EngineResponse
from kvwire.integrations.vllm.proxy.engines import Beginning, VllmEngine
from kvwire.integrations.vllm.proxy.limits import PROXY_EVENT_BYTES_MAX
from kvwire.wire.control import DECODE_ERRORS

COMPLETIONS: Final = "/v1/completions"

# Reasons why decode begins a stream; moving.py adds fields of the request.
ONE_ENGINE: Final = "one engine"
DECODE_FIRST: Final = "decode was first"
FIRST_OF_ITS_KIND: Final = "first of its kind"
PARSED: Final = "parsed"
ENDED: Final = "ended"
NO_SEED: Final = "no seed"
STOP: Final = "stop"

_SEED_BITS: Final = 63
# The exceptions for an answer that lacks a field or has an unexpected value in it.
_ODD: Final = (
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    *DECODE_ERRORS,
)
_LISTED: Final = ("token_ids", "prompt_token_ids")
# Fields of a choice that are filled in; all others are null in the beginning.
_FILLED: Final = frozenset(("index", "text", "delta", "logprobs", *_LISTED))
# Fields that name an answer; the two engines have different values.
_NAMES: Final = ("id", "created", "model")
# How much of an engine's error text is quoted.
_QUOTED_CHARS: Final = 500


class OtherToken(EngineFailed):
    """Reports that decode's first token differs from the token that the client has."""

    @property
    def down(self) -> bool:
        """False: a different order of summation may choose another token."""
        return False


@dataclass(slots=True)
class FirstToken:
    """The first token of a request's stream, if prefill may send it."""

    path: str  # the API's path
    body: Mapping[str, Any]  # as the client sent it
    why: str = ONE_ENGINE  # why decode begins the stream; "" if prefill does
    # The bytes that the client gets at once; and the part of the token's text that it
    # gets later, since it may be the beginning of a stop string.
    events: list[dict[str, Any]] = field(default_factory=list)
    kept: str = ""
    prompt: list[int] = field(default_factory=list)  # the prompt's tokens
    token: int = -1  # the token
    seen: bool = True  # whether the client sees any of its text
    seed: int = field(default_factory=lambda: secrets.randbits(_SEED_BITS))

    @property
    def count(self) -> int:
        """The number of events in the beginning; a chat has one more, for the role."""
        return 1 if self.path == COMPLETIONS else 2

    def of_both(self, prefill: VllmEngine) -> Mapping[str, Any] | None:
        """Return the extra fields that both engines' requests need for the same token.

        Return None if the two engines may sample different tokens.
        """
        if self.body.get("seed") is not None or self.body.get("temperature") == 0:
            return {}
        if prefill.seeds:
            return {"seed": self.seed}
        self.why = NO_SEED
        return None

    def begin(self, decode: VllmEngine, answer: Any) -> str:
        """Begin the stream with prefill's answer, if that is possible.

        Returns:
            The content type of the stream; "" if decode begins it.
        """
        form = decode.beginnings.get(self._kind)
        if form is None or not form.events:
            self.why = FIRST_OF_ITS_KIND if form is None else PARSED
            return ""
        try:
            self.why = self._fill(deepcopy(form.events), answer)
        except _ODD:
            self.why = PARSED
        return "" if self.why else form.content_type

    def learn(self, decode: VllmEngine, kind: str, content: bytes, answer: Any) -> None:
        """Store the form in which decode begins streams, if it is not known yet.

        Args:
            decode: The engine.
            kind: The content type of its stream.
            content: The events of the beginning.
            answer: Prefill's answer to the same request.
        """
        events: list[dict[str, Any]] = []
        plain: bool | None = False
        try:
            events = _decoded(content)
            plain = self._is_plain(events, answer)
        except _ODD:
            events = []
        if plain is None:
            return
        for event in events:
            for holder in (event, *event["choices"]):
                holder |= {name: None for name in _LISTED if name in holder}
        # bounded: two paths, with and without counts of tokens
        decode.beginnings[self._kind] = Beginning(kind, events if plain else [])

    def behind(self, decode: VllmEngine, content: bytes) -> tuple[bytes, Any]:
        """Return the part of decode's beginning that the client does not have yet.

        Raises:
            OtherToken: The client has a different token.
            EngineFailed: The beginning has a different form than earlier ones.
        """
        try:
            event = _decoded(content)[-1]
            (choice,) = event["choices"]
            same = self._remove(choice)
            left = _has_content(choice)
        except _ODD:
            decode.beginnings[self._kind] = Beginning("", [])
            # It has more than tokens, so nothing can continue from them.
            self.prompt.clear()
            why = "its stream begins in a different form than earlier ones"
            raise EngineFailed(decode, why) from None
        if not same:
            raise OtherToken(decode, "its first token differs from prefill's")
        named = {name: event.get(name) for name in _NAMES}
        event |= {name: self.events[0][name] for name in _NAMES}
        rest = b"data: " + msgspec.json.encode(event) + b"\n\n" if left else b""
        return rest, named

    @property
    def _kind(self) -> tuple[str, bool]:
        """The properties that determine the form of the beginning."""
        options = self.body.get("stream_options")
        counts = isinstance(options, dict) and options.get("continuous_usage_stats")
        return self.path, bool(counts)

    def _fill(self, events: list[dict[str, Any]], answer: Any) -> str:
        """Fill in the events; return why decode must begin the stream, or ""."""
        (choice,) = answer["choices"]
        if choice["finish_reason"] != "length":
            return ENDED
        text = _text_of(choice)
        if text is None:
            return PARSED
        shown = _shown(self.body, text)
        if shown is None:
            return STOP
        first = events[-1]["choices"][0]
        chat = "delta" in first
        if chat:
            first["delta"]["content"] = shown
            events[0]["choices"][0]["delta"]["role"] = choice["message"]["role"]
        else:
            first["text"] = shown
        first["logprobs"] = choice["logprobs"]
        # In a chat, the prompt's tokens are beside the choices.
        prompt = (answer if chat else choice)["prompt_token_ids"]
        listed = bool(self.body.get("return_token_ids"))
        if listed:
            first["token_ids"] = choice["token_ids"]
            (events[0] if chat else first)["prompt_token_ids"] = prompt
        for tokens, event in enumerate(events, 2 - len(events)):
            event |= {name: answer[name] for name in _NAMES}
            if "usage" in event:
                asked = answer["usage"]["prompt_tokens"]
                event["usage"] |= {
                    "prompt_tokens": asked,
                    "completion_tokens": tokens,
                    "total_tokens": asked + tokens,
                }
        (self.token,) = choice["token_ids"]
        self.seen = bool(shown) or listed or choice["logprobs"] is not None
        self.kept = text[len(shown) :]
        self.prompt = list(prompt)
        self.events = events
        return ""

    def _is_plain(self, events: list[Any], answer: Any) -> bool | None:
        """Return whether a beginning is prefill's token; None if that is unknown."""
        (choice,) = answer["choices"]
        choices = [event["choices"][0] for event in events]
        first = choices[-1]
        if choice["finish_reason"] != "length" or first["finish_reason"] is not None:
            return None
        for one in choices:
            if any(one[name] is not None for name in one.keys() - _FILLED):
                return False
        text = _text_of(choice)
        if text is None:
            return False
        if self.path != COMPLETIONS:
            role, delta = (one["delta"].keys() for one in choices)
            if role != {"role", "content"} or delta != {"content"}:
                return False
        return True if _text_of(first) == _shown(self.body, text) else None

    def _remove(self, choice: dict[str, Any]) -> bool:
        """Remove the client's part from decode's choice; return False if it is absent.

        An event may have several tokens.
        """
        given = self.events[-1]["choices"][0]
        holder = choice.get("delta", choice)
        name = "text" if holder is choice else "content"
        shown = _text_of(given) or ""
        # The engine's parser has turned the same token into something else.
        if shown and name not in holder:
            raise KeyError(name)
        if shown:
            if not holder[name].startswith(shown):
                return False
            holder[name] = holder[name][len(shown) :]
        if ids := choice.get("token_ids"):
            if ids[0] != self.token:
                return False
            choice["token_ids"] = ids[1:]
        if given["logprobs"] is not None:
            logged = choice["logprobs"]
            if _tokens_in(logged)[:1] != _tokens_in(given["logprobs"]):
                return False
            choice["logprobs"] = {key: those[1:] for key, those in logged.items()}
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None
        return True


class Continued(AsyncIterator[bytes]):
    """Decode's stream after the events that the client already has."""

    def __init__(
        self,
        first: FirstToken,
        decode: VllmEngine,
        answer: asyncio.Future[EngineResponse],
    ) -> None:
        self._first = first
        self._decode = decode
        self._answer = answer
        self._parts: AsyncIterator[bytes] | None = None
        # The name in its events, and the name that the client knows.
        self._renames: list[tuple[bytes, bytes]] = []
        self._tail = b""  # a part of an event. bounded: PROXY_EVENT_BYTES_MAX

    @property
    def unchanged(self) -> AsyncIterator[bytes] | None:
        """Decode's own stream, if the rest can be passed on unchanged."""
        return None if self._renames else self._parts

    async def __anext__(self) -> bytes:
        """Return the next part of decode's stream.

        Raises:
            EngineFailed: Decode does not continue what the client has.
        """
        part = b"" if self._parts is not None else await self._begin()
        while not part:
            assert self._parts is not None
            part = self._renamed(await anext(self._parts))
        return part

    async def _begin(self) -> bytes:
        """Return the received part after the beginning."""
        answer = await self._answer
        if answer.is_error:
            content = await answer.body(PROXY_EVENT_BYTES_MAX)
            why = f"it answers {content.decode(errors='replace')[:_QUOTED_CHARS]}"
            raise EngineFailed(self._decode, why, answer.status)
        content, rest = await read_beginning(answer, self._first.count)
        left, named = self._first.behind(self._decode, content)
        self._parts = answer.parts
        given = self._first.events[0]
        for name in _NAMES:
            if named[name] != given[name]:
                pair = _member(name, named[name]), _member(name, given[name])
                self._renames.append(pair)  # bounded: _NAMES
        return left + self._renamed(rest)

    def _renamed(self, part: bytes) -> bytes:
        """Return the complete events of a part, with the id that the client knows."""
        if not self._renames:
            return part
        events, mark, self._tail = (self._tail + part).rpartition(b"\n\n")
        if len(self._tail) > PROXY_EVENT_BYTES_MAX:
            why = f"an event has more than {PROXY_EVENT_BYTES_MAX} bytes"
            raise EngineFailed(self._decode, why)
        # In a text, quotation marks have a backslash before them.
        for old, new in self._renames:
            events = events.replace(old, new)
        return events + mark


async def read_beginning(answer: EngineResponse, count: int) -> tuple[bytes, bytes]:
    """Read a number of events; return them, and the bytes received after them.

    Cancel safety: safe, but the part already read is lost.
    """
    read = b""
    while read.count(b"\n\n") < count and len(read) < PROXY_EVENT_BYTES_MAX:
        part = await anext(answer.parts, None)
        if part is None:
            break
        read += part
    events = read.split(b"\n\n", count)
    rest = events.pop()
    return b"".join(event + b"\n\n" for event in events), rest


def _member(name: str, value: Any) -> bytes:
    """Return the JSON text of an object's member."""
    return msgspec.json.encode({name: value})[1:-1]


def _decoded(content: bytes) -> list[dict[str, Any]]:
    """Decode the events of a stream."""
    events = content.split(b"\n\n")[:-1]
    kind = dict[str, Any]
    return [
        msgspec.json.decode(one.removeprefix(b"data:"), type=kind) for one in events
    ]


def _text_of(choice: Mapping[str, Any]) -> str | None:
    """Return a choice's text; None if its engine has parsed the text."""
    if "text" in choice:
        text = choice["text"]
    else:
        message = choice["delta"] if "delta" in choice else choice["message"]
        text = message.get("content")
        if any(message[name] for name in message.keys() - {"role", "content"}):
            return None
    return text if isinstance(text, str) else None


def _has_content(choice: Mapping[str, Any]) -> bool:
    """Return whether a choice has content for a client."""
    delta = choice.get("delta", {"text": choice.get("text")})
    more = choice.get("token_ids"), _tokens_in(choice.get("logprobs"))
    return choice["finish_reason"] is not None or any((*delta.values(), *more))


def _tokens_in(logprobs: Any) -> list[str]:
    """Return the tokens to which these probabilities belong."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return [one["token"] for one in logprobs["content"]]
    return list(logprobs["tokens"])


def _shown(body: Mapping[str, Any], text: str) -> str | None:
    """Return the part of a first token's text that vLLM would send at once.

    vLLM keeps back as many characters as a stop string may need. Return None if the
    text ends like the beginning of a stop string: then tokens alone do not determine
    the answer.
    """
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if any(text.endswith(one[:n]) for one in stops for n in range(1, len(one))):
        return None
    if body.get("include_stop_str_in_output"):
        return text
    kept = max((len(one) - 1 for one in stops), default=0)
    return text[: max(0, len(text) - kept)]
