"""Whether an answer is right, a near tie, or made of something else's KV."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

# bfloat16 has 8 bits of a number: two logits closer than this are one to it.
BF16: Final = 2.0**-8


class Outcome(enum.Enum):
    RIGHT = "right"
    NEAR = "near tie"
    WRONG = "wrong"
    ERROR = "error"
    HANG = "hang"
    KILLED = "killed with decode"
    LEFT = "client left"


@dataclass(frozen=True, slots=True)
class Reference:
    """What one engine alone answers."""

    ids: Sequence[int]  # the prompt
    tokens: Sequence[int]  # the answer
    # For each, another one that is as good in bfloat16; -1 if there is none.
    near: Sequence[int]

    @classmethod
    def of(cls, ids: Sequence[int], said: Any) -> Self:
        """Read an answer that has the two best logits of each token."""
        (choice,) = said["choices"]
        best = choice["logprobs"]["top_logprobs"]
        return cls(ids, choice["token_ids"], [_near(logits) for logits in best])


def judged(known: Reference, said: Any) -> Outcome:
    """Compare an answer with what one engine alone says."""
    tokens = said["choices"][0]["token_ids"]
    if list(tokens) == list(known.tokens):
        return Outcome.RIGHT
    pairs = zip(tokens, known.tokens, known.near, strict=False)
    for ours, theirs, near in pairs:
        if ours != theirs:
            return Outcome.NEAR if ours == near else Outcome.WRONG
    return Outcome.WRONG  # one is shorter


def _near(logits: dict[str, float]) -> int:
    """Return the second best token, if its logit is not told from the best one's."""
    named = sorted((logit, name) for name, logit in logits.items())
    (second, name), (first, _) = named[-2:]
    if first - second > BF16 * max(abs(first), abs(second)):
        return -1
    return int(name.removeprefix("token_id:"))
