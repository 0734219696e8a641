"""What the program takes for alike, and what it asks."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from packages.vllm.tests.support.requests import (
    Likeness,
    apart,
    draw,
    likeness,
)


def stream(*texts: str, logprob: float = -0.5) -> str:
    events = [
        {"choices": [{"index": 0, "text": text, "logprobs": {"l": [logprob]}}]}
        for text in texts
    ]
    written = [f"data: {json.dumps(event)}\n\n" for event in events]
    return f"200 {''.join(written)}data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (stream("a", "b"), stream("a", "b"), Likeness.BYTES),
        (stream("a"), stream("a", logprob=-0.50001), Likeness.DIGITS),
        (stream("a"), stream("a", logprob=-0.6), Likeness.DIFFERENT),
        (stream("a"), stream("b"), Likeness.DIFFERENT),
        (stream("a"), stream("a").replace("200", "400"), Likeness.DIFFERENT),
        (stream("a", "b"), stream("a"), Likeness.DIFFERENT),
        ('200 data: {"error": 1}', '500 {"error": 2}', Likeness.FAILED),
        (stream("a"), '500 {"error": 2}', Likeness.DIFFERENT),
        ('200 {,"a":1}', '200 {,"a":1.0}', Likeness.GROUPED),
        ('200 {,"a":1}', '200 {,"a":2}', Likeness.DIFFERENT),
    ],
)
def test_what_is_alike(one: str, other: str, alike: Likeness) -> None:
    assert likeness(one, other) is alike


def test_tokens_in_other_events_are_alike() -> None:
    one = stream("a", "b").replace('"logprobs": {"l": [-0.5]}', '"more": null')
    assert likeness(one, one.replace('"a"', '"ab"').replace('"b"', '""')) is (
        Likeness.GROUPED
    )


def test_tokens_that_cannot_come_are_alike() -> None:
    """Those of a chat, which name the token, and those of a completion."""
    chat = '[{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -9999.0}]'
    whole = stream("a").replace("[-0.5]", chat)
    assert likeness(whole, whole.replace('"b"', '"c"')) is Likeness.DIGITS
    assert likeness(whole, whole.replace("-9999.0", "-9.0")) is Likeness.DIFFERENT
    whole = stream("a").replace("[-0.5]", '[{"a": -0.5, "b": -9999.0}]')
    assert likeness(whole, whole.replace('"b"', '"c"')) is Likeness.DIGITS
    assert likeness(whole, whole.replace('"a": -', '"c": -')) is Likeness.DIFFERENT


def test_the_place_where_they_differ_is_shown() -> None:
    same = "x" * 1000
    assert [said[-3:] for said in apart(same + "a", same + "b")] == ["xa'", "xb'"]


def test_a_seed_is_a_request() -> None:
    """Each option is one of some request, and each request is the same again."""
    drawn = [draw(random.Random(seed)) for seed in range(300)]
    assert drawn == [draw(random.Random(seed)) for seed in range(300)]
    fields: set[Any] = {name for one in drawn for name in one.body}
    assert fields >= {"seed", "stop", "logprobs", "tools", "n", "echo", "messages"}
    # A sampled request without one would be answered otherwise each time.
    assert all(one.body["temperature"] == 0 or "seed" in one.body for one in drawn)
