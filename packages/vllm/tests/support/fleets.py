"""Real engines behind a proxy: who is up, streams that are read, and what is right."""

from __future__ import annotations

import json
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import (
    ANSWERS_WITHIN_S,
    Engine,
    Front,
    asked,
    before,
    engine,
    front,
    tokens_of,
)
from tests.support.waiting import eventually

FETCHED = "vllm:external_prefix_cache_hits_total"
# As many as an operator needs time to act, on a machine that does nothing else.
TOKENS = 400


def asking(
    ids: list[int], tokens: int = TOKENS, *, chat: bool = False
) -> tuple[str, dict[str, Any]]:
    """Where a request is sent to, and what it says."""
    if not chat:
        return "/v1/completions", asked(tokens, prompt=ids)
    # The special w0, w1 and w2 split longer words that begin with them.
    text = " ".join(f"w{300 + one % 200}" for one in ids)
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", asked(tokens, messages=messages)


@dataclass(slots=True)
class Stream:
    """An answer in events, as far as it was read."""

    id: str = ""
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    chat: bool = False
    prompt: list[int] = field(default_factory=list)

    def read(
        self,
        url: str,
        ids: list[int],
        at: int,
        then: Callable[[], None],
        tokens: int = TOKENS,
        **more: Any,
    ) -> None:
        """Read it all; do something, in a thread of its own, at a token."""
        path, body = asking(ids, tokens, chat=self.chat)
        body |= {"stream": True, "stream_options": {"include_usage": True}, **more}
        doing = threading.Thread(target=then)
        with httpx.stream(
            "POST", url + path, json=body, timeout=ANSWERS_WITHIN_S
        ) as said:
            for line in said.iter_lines():
                self.take(line)
                if len(self.tokens) >= at and doing.ident is None:
                    doing.start()
        doing.join()

    def take(self, line: str) -> None:
        """Take in a line of the answer."""
        event = line.removeprefix("data: ")
        if not event or event == "[DONE]":
            return
        said = json.loads(event)
        assert "error" not in said, said
        assert self.id in ("", said["id"])
        self.id = said["id"]
        self.usage = said.get("usage") or self.usage
        for choice in said["choices"]:
            assert ("delta" in choice) == self.chat
            holder = said if self.chat else choice
            self.prompt += holder.get("prompt_token_ids") or []
            ids = choice.get("token_ids") or []
            self.tokens += ids
            self.at += [time.monotonic()] * len(ids)

    @property
    def pause(self) -> str:
        """The longest time between two tokens, and a mean one: several come at once."""
        gaps = sorted(b - a for a, b in zip(self.at, self.at[1:], strict=False))
        usual = statistics.mean(gaps[:-1])
        return f"{gaps[-1] * 1e3:.0f} ms, {gaps[-1] / usual:.1f} decode steps"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, each with a role, and the proxy before them."""

    engines: list[Engine]
    roles: Sequence[str]
    proxy: Front

    def of(self, role: str) -> list[Engine]:
        pairs = zip(self.engines, self.roles, strict=True)
        return [one for one, its_role in pairs if its_role == role]

    @property
    def prefill(self) -> Engine:
        return self.of("prefill")[0]

    @property
    def decode(self) -> Engine:
        return self.of("decode")[0]

    @property
    def fetched(self) -> float:
        """Tokens whose KV came from another engine."""
        return sum(one.metric(FETCHED) for one in self.of("decode"))

    def at_work(self) -> Engine:
        """The engine that a request is at; between two engines it is at none."""
        found: list[Engine] = []

        def working() -> bool:
            busy = self.proxy.engines("running")
            found.extend(one for one in self.engines if one.url in busy)
            return bool(found)

        assert eventually(working)
        return found[0]

    def are_up(self, *engines: Engine) -> bool:
        """Whether these get requests in the end, and no others."""
        wanted = {one.url for one in engines}
        return eventually(lambda: self.proxy.engines("up") == wanted)

    def shown(self) -> dict[str, dict[str, Any]]:
        """What the proxy shows of each engine, by its URL."""
        said = httpx.get(f"{self.proxy.url}/fleet").json()
        return {one["url"]: one for one in said["engines"]}

    def drain(self, one: Engine) -> None:
        """Have no request at an engine any more."""
        said = self.proxy.post("/drain", engine=one.url, wait_s=ANSWERS_WITHIN_S)
        assert said.json() == {"engine": one.url, "running": 0}

    def stop(self, one: Engine) -> None:
        """Ask an engine to end, and wait until it has."""
        assert one.running is not None
        one.running.send_signal(signal.SIGTERM)
        one.running.wait(ANSWERS_WITHIN_S)

    def restart(self, one: Engine) -> None:
        """As an operator does: drain it, end it, start it."""
        self.drain(one)
        self.stop(one)
        one.start()
        one.wait()
        assert eventually(lambda: one.url in self.proxy.engines("up"))

    def migrate(self) -> None:
        """Move the request that is at work."""
        said = self.proxy.post("/migrate", engine=self.at_work().url)
        assert said.status_code == 200, said.text

    def check_stream(
        self, ids: list[int], at: int, then: Callable[[], None], *, chat: bool = False
    ) -> Stream:
        """Check the same of a stream, and do something at a token of it."""
        one = Stream(chat=chat)
        one.read(self.proxy.url, ids, at, then)
        alone = next(one for one in self.engines if one.running is not None)
        assert one.tokens == own(alone, one.prompt, TOKENS)
        assert chat or one.prompt == ids
        assert one.usage["prompt_tokens"] == len(one.prompt)
        assert one.usage["completion_tokens"] == TOKENS
        return one


def own(engine: Engine, ids: list[int], tokens: int) -> list[int]:
    """What an engine answers alone: of KV that nobody else has computed."""
    salt = f"alone {ids[:4]} {ids[-4:]}"
    return tokens_of(engine.generate(ids, tokens, cache_salt=salt))


@contextmanager
def fleet_of(
    model: Path,
    folder: Path,
    roles: Sequence[str],
    *options: str,
    directory: str = "",
    policy: str = "recompute",
) -> Iterator[Fleet]:
    """Engines of these roles that serve, found in a directory or named to the proxy."""
    engines = []
    for core, role in enumerate(roles):
        transfer: dict[str, Any] = {"lease_s": 3.0, "require": ["tcp"]}
        if directory:
            transfer |= {"directory": directory, "role": role}
        name = f"{role}-{core}"
        engines.append(engine(model, folder, name, core, transfer, policy=policy))
    found = ["--directory", directory] if directory else before(engines, roles)
    proxy = front(folder, *found, *options)
    with running(*engines, proxy):
        fleet = Fleet(engines, roles, proxy)
        assert fleet.are_up(*engines)
        yield fleet
