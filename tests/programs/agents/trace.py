"""Sessions of agents: prompts that grow by a tool's output after each pause.

A trace is drawn from a seed, and played on the clock: the same calls at the same times,
as far as the engine answers in time, whatever answers them.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.support.engines.serving import ANSWERS_WITHIN_S, asked, prompt

# Of a tool's output, and of an answer.
_TOOL_TOKENS: Final = (40, 120)
ANSWER_TOKENS: Final = 12
# Until a tool's output is there; meanwhile other sessions use the engine's cache.
_PAUSE_S: Final = (8.0, 16.0)


@dataclass(frozen=True, slots=True)
class Tool:
    """One call of a tool."""

    pause_s: float
    output: list[int]


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation."""

    begins_s: float
    prompt: list[int]
    tools: Sequence[Tool]


def draw(
    sessions: int, tools: int, each_s: float, seed: int, tokens: int = 750
) -> list[Session]:
    """Draw a trace in which a session begins every `each_s` seconds on average.

    Its first prompt has about so many tokens.
    """
    chance = random.Random(seed)
    made = []
    begins_s = 0.0
    for number in range(sessions):
        calls = [
            Tool(
                chance.uniform(*_PAUSE_S),
                prompt(chance.randint(*_TOOL_TOKENS), chance.randrange(10**6)),
            )
            for _ in range(tools)
        ]
        ids = prompt(
            chance.randint(tokens * 4 // 5, tokens * 6 // 5), 1000 * seed + number
        )
        made.append(Session(begins_s, ids, calls))
        begins_s += chance.expovariate(1 / each_s)
    return made


@dataclass(slots=True)
class Played:
    """What a trace was like for its sessions."""

    first_s: list[float] = field(default_factory=list)  # to the first token, at first
    after_s: list[float] = field(default_factory=list)  # likewise, after a tool's call
    answers: list[list[int]] = field(default_factory=list)  # all of each session
    announced: int = 0  # how many announcements had an effect
    # Where the tokens of all prompts came from, by vLLM's names.
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """The median after a call."""
        return statistics.median(self.after_s)

    @property
    def p90_s(self) -> float:
        """What nine of ten calls do not exceed."""
        return statistics.quantiles(self.after_s, n=10)[-1]


Announce = Callable[[httpx.AsyncClient, list[int]], Awaitable[bool]]
"""Announces that a prompt which begins with these tokens comes soon.

It returns whether anything was done.
"""


@dataclass(frozen=True, slots=True)
class Player:
    """Plays a trace.

    Attributes:
        url: Where requests go.
        more: Fields of each request.
        waits: Fields of a request whose answer calls a tool.
        ends: Fields of a session's last request.
        announce: See :data:`Announce`; None if nobody announces anything.
        lead_s: How long before a tool's output is there its session announces it.
    """

    url: str
    more: dict[str, Any] = field(default_factory=dict)
    waits: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, Any] = field(default_factory=dict)
    announce: Announce | None = None
    lead_s: float = 1.0

    def play(self, trace: Sequence[Session]) -> Played:
        """Play it; this takes as long as the trace, or longer if the engine is late."""
        return asyncio.run(self._play(trace))

    async def _play(self, trace: Sequence[Session]) -> Played:
        found = Played(answers=[[] for _ in trace])
        limits = httpx.Limits(max_connections=len(trace) + 1)
        async with (
            httpx.AsyncClient(timeout=ANSWERS_WITHIN_S, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for session, answers in zip(trace, found.answers, strict=True):
                tasks.create_task(self._session(client, session, found, answers))
        return found

    async def _session(
        self,
        client: httpx.AsyncClient,
        session: Session,
        found: Played,
        answers: list[int],
    ) -> None:
        await asyncio.sleep(session.begins_s)
        ids = list(session.prompt)
        times = found.first_s
        for tool in session.tools:
            answer, first_s = await self._ask(client, ids, self.waits)
            times.append(first_s)
            times = found.after_s
            answers += answer
            ids += answer
            lead_s = self.lead_s if self.announce is not None else 0.0
            await asyncio.sleep(tool.pause_s - lead_s)
            if self.announce is not None:
                found.announced += await self.announce(client, ids)
                await asyncio.sleep(lead_s)
            ids += tool.output
        answer, first_s = await self._ask(client, ids, self.ends)
        times.append(first_s)
        answers += answer

    async def _ask(
        self, client: httpx.AsyncClient, ids: list[int], fields: dict[str, Any]
    ) -> tuple[list[int], float]:
        """Return an answer, and the time to its first token."""
        body = asked(ANSWER_TOKENS, prompt=ids, stream=True, **self.more, **fields)
        answer: list[int] = []
        first_s = 0.0
        began = time.monotonic()
        url = f"{self.url}/v1/completions"
        async with client.stream("POST", url, json=body) as said:
            async for line in said.aiter_lines():
                event = line.removeprefix("data: ")
                if event and event != "[DONE]":
                    answer += json.loads(event)["choices"][0].get("token_ids") or []
                    if answer and not first_s:
                        first_s = time.monotonic() - began
        assert len(answer) == ANSWER_TOKENS, f"status {said.status_code}"
        return answer, first_s
