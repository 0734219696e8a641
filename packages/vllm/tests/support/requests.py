"""Requests with many kinds of options, and their answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import httpx

from packages.vllm.tests.support.models import EOS_TOKEN, VOCABULARY
from packages.vllm.tests.support.serving import ANSWERS_WITHIN_S

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
# Both name their answers, and neither says the same time.
_NAMES: Final = re.compile(r'"id":"[^"]*"|"created":\d+')
_QUOTED_CHARS: Final = 300
# Texts that come in pieces.
_PIECES: Final = (".text", ".content", ".reasoning", ".arguments")
# How an answer of a server begins that fails at once.
_FAILURES: Final = ("500 ", '200 data: {"error"')
# By so much may probabilities differ whose sums were in another order, in this type.
_SUMS: Final = 1e-3
# What vLLM says of a token that cannot come. Which of all such tokens it lists beside
# those that can is chance: their probabilities are equal.
_NEVER: Final = -9999.0
_TOOL: Final = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


class Likeness(StrEnum):
    """How two answers are alike."""

    BYTES = "same bytes"
    GROUPED = "tokens grouped otherwise"
    DIGITS = "last digits of probabilities"
    FAILED = "both fail"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and where it is sent to."""

    path: str
    body: dict[str, Any]
    options: frozenset[str] = field(default_factory=frozenset)

    @property
    def said(self) -> str:
        """What it says, without its prompt."""
        prompts = ("prompt", "messages")
        body = {name: one for name, one in self.body.items() if name not in prompts}
        return f"{self.path} {body}"

    def answer(self, client: httpx.Client, url: str, **more: Any) -> str:
        """All of its answer, without its name."""
        body = self.body | more
        said = client.post(url + self.path, json=body, timeout=ANSWERS_WITHIN_S)
        return f"{said.status_code} {_NAMES.sub('', said.text)}"


def draw(chance: random.Random) -> Request:
    """A request that one engine answers the same each time."""
    chat = chance.random() < 0.4
    body: dict[str, Any] = {"model": "m", "max_tokens": chance.choice((2, 3, 5, 9))}
    sampled = chance.random() < 0.5
    lengths = [1, 7, *[40] * 12, *[60] * 6, *[127, 128, 129] * 2, 300, 700, 2100]
    # On CPUs, vLLM dies of a seed if it computes a prompt in several steps.
    length = chance.choice(lengths[: -1 if sampled else None])
    ids = [chance.randrange(5, VOCABULARY) for _ in range(length)]
    if chat:
        words = "".join(chance.choice("abcdefgh é") for _ in ids)
        body["messages"] = [{"role": "user", "content": words}]
    else:
        body["prompt"] = ids
    body["temperature"] = chance.choice((0.3, 0.8, 1.5)) if sampled else 0
    if sampled:
        body["seed"] = chance.randrange(2**40)
    chosen = {
        name: option
        for name, (likely, of_chats, option) in _OPTIONS.items()
        if chance.random() < likely and of_chats in (None, chat)
    }
    for option in chosen.values():
        body |= option(chance)
    if not body.get("stream"):
        body.pop("stream_options", None)
    return Request(CHATS if chat else COMPLETIONS, body, frozenset(chosen))


def _stops(chance: random.Random) -> dict[str, Any]:
    letters = "etaoin abc"
    count = chance.randrange(1, 4)
    size = chance.randrange(1, 4)
    stop = ["".join(chance.choices(letters, k=size)) for _ in range(count)]
    return {"stop": stop, "include_stop_str_in_output": chance.random() < 0.3}


# How likely each option is, whether it is one of chats (None: of both), and its fields.
_OPTIONS: Final[dict[str, tuple[float, bool | None, Any]]] = {
    "stream": (0.9, None, lambda _: {"stream": True}),
    "usage": (0.3, None, lambda _: {"stream_options": {"include_usage": True}}),
    "counts": (
        *(0.2, None),
        lambda _: {
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}
        },
    ),
    "one token": (0.05, None, lambda _: {"max_tokens": 1}),
    "newer name": (0.3, True, lambda c: {"max_completion_tokens": c.randrange(2, 9)}),
    "min_tokens": (0.15, None, lambda c: {"min_tokens": c.randrange(1, 3)}),
    "ignore_eos": (0.3, None, lambda _: {"ignore_eos": True}),
    "ends at once": (0.05, None, lambda _: {"logit_bias": {str(EOS_TOKEN): 100}}),
    "logit_bias": (0.1, None, lambda c: {"logit_bias": {str(c.randrange(500)): 20}}),
    "top": (0.2, None, lambda _: {"top_p": 0.9, "top_k": 50, "min_p": 0.01}),
    "repetition": (0.1, None, lambda _: {"repetition_penalty": 1.3}),
    "penalties": (
        *(0.1, None),
        lambda _: {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    ),
    "stop": (0.2, None, _stops),
    "stop tokens": (
        *(0.1, None),
        lambda c: {"stop_token_ids": [c.randrange(VOCABULARY) for _ in range(20)]},
    ),
    "token ids": (0.15, None, lambda _: {"return_token_ids": True}),
    "logprobs": (0.15, False, lambda c: {"logprobs": c.randrange(4)}),
    "logprobs of chats": (
        *(0.15, True),
        lambda c: {"logprobs": True, "top_logprobs": c.randrange(4)},
    ),
    "special": (0.1, None, lambda _: {"skip_special_tokens": False}),
    "echo": (0.04, False, lambda _: {"echo": True}),
    "n": (0.04, None, lambda _: {"n": 2}),
    "bad words": (0.04, None, lambda _: {"bad_words": ["e", "ab"]}),
    "tools": (0.1, True, lambda _: {"tools": [_TOOL], "tool_choice": "auto"}),
    "tools not to call": (
        *(0.1, True),
        lambda _: {"tools": [_TOOL], "tool_choice": "none"},
    ),
    "plain text": (0.05, None, lambda _: {"response_format": {"type": "text"}}),
    "no limit": (0.05, False, lambda _: {"max_tokens": None}),
    "choice": (
        *(0.04, None),
        lambda _: {"structured_outputs": {"choice": ["yes", "no", "maybe"]}},
    ),
    "object": (0.04, None, lambda _: {"response_format": {"type": "json_object"}}),
}


def likeness(one: str, other: str) -> Likeness:
    """How two answers are alike."""
    if one == other:
        return Likeness.BYTES
    # A proxy has the status of an error that its engine puts into a stream.
    if all(said.startswith(_FAILURES) for said in (one, other)):
        return Likeness.FAILED
    merged = _merged(one), _merged(other)
    if merged[0] == merged[1]:
        return Likeness.GROUPED
    return Likeness.DIGITS if _are_close(*merged) else Likeness.DIFFERENT


def apart(one: str, other: str) -> list[str]:
    """Show two texts from a little before the place where they differ."""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, at - _QUOTED_CHARS)
    return [repr(said[start : at + _QUOTED_CHARS]) for said in (one, other)]


def _merged(said: str) -> Any:
    """An answer, whatever events its tokens came in."""
    status, _, content = said.partition(" ")
    if not content.startswith("data:"):
        return status, _json(content)
    whole: dict[str, Any] = {}
    events = [event.removeprefix("data: ") for event in content.strip().split("\n\n")]
    for event in events[:-1]:
        for place, value in _leaves(_json(event)):
            if isinstance(value, list):
                whole[place] = whole.get(place, []) + value
            elif isinstance(value, str) and place.endswith(_PIECES):
                whole[place] = whole.get(place, "") + value
            elif value is not None:
                whole[place] = value
    return status, events[-1], whole


def _json(text: str) -> Any:
    # Without its name an object may begin with commas.
    return json.loads(re.sub(r",(?=[,}])", "", re.sub(r"(?<={),+", "", text)))


def _leaves(said: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(said, Mapping):
        for name, value in said.items():
            yield from _leaves(value, f"{place}.{name}")
    elif place.endswith((".choices", ".tool_calls")):
        for one in said or ():
            yield from _leaves(one, f"{place}{one['index']}")
    else:
        yield place, said


def _are_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < _SUMS
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        one, other = _possible(one), _possible(other)
        return [*one] == [*other] and _are_close([*one.values()], [*other.values()])
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_are_close(*pair) for pair in pairs)
    return bool(one == other)


def _possible(said: Mapping[str, Any]) -> dict[str, Any]:
    """An object without tokens that cannot come."""
    if said.get("logprob") == _NEVER:
        return {}
    return {name: value for name, value in said.items() if value != _NEVER}
