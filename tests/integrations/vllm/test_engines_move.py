"""Requests that go on at another of two real vLLM engines: moved, drained, killed."""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.engines.models import make_model
from tests.support.engines.pairs import running
from tests.support.engines.serving import (
    ANSWERS_WITHIN_S,
    NEEDS_VLLM,
    Engine,
    Front,
    asked,
    engine,
    front,
    prompt,
    tokens_of,
)
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(900)]
FETCHED = "vllm:external_prefix_cache_hits_total"
# As many as an operator needs time to act, on a machine that does nothing else.
TOKENS = 400


def asking(ids: list[int], *, chat: bool) -> tuple[str, dict[str, Any]]:
    """Where a request is sent to, and what it says."""
    if not chat:
        return "/v1/completions", asked(TOKENS, prompt=ids)
    text = " ".join(f"w{one}" for one in ids)
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", asked(TOKENS, messages=messages)


@dataclass(slots=True)
class Stream:
    id: str = ""
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    chat: bool = False
    prompt: list[int] = field(default_factory=list)

    def read(self, url: str, ids: list[int], at: int, then: Callable[[], None]) -> None:
        """Read it all; do something, in a thread of its own, at a token."""
        path, body = asking(ids, chat=self.chat)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        doing = threading.Thread(target=then)
        with httpx.stream(
            "POST", url + path, json=body, timeout=ANSWERS_WITHIN_S
        ) as said:
            for line in said.iter_lines():
                event = line.removeprefix("data: ")
                if not event or event == "[DONE]":
                    continue
                self._take(json.loads(event))
                if len(self.tokens) >= at and doing.ident is None:
                    doing.start()
        doing.join()

    def _take(self, said: dict[str, Any]) -> None:
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
class Two:
    engines: tuple[Engine, Engine]
    proxy: Front

    def at_work(self) -> Engine:
        busy = self.proxy.engines("running")
        return next(one for one in self.engines if one.url in busy)

    def right(
        self, ids: list[int], at: int, then: Callable[[], None], *, chat: bool = False
    ) -> Stream:
        one = Stream(chat=chat)
        one.read(self.proxy.url, ids, at, then)
        alone = next(one for one in self.engines if one.running is not None)
        salt = f"alone {ids[:4]}"
        want = tokens_of(alone.generate(one.prompt, TOKENS, cache_salt=salt))
        assert one.tokens == want
        assert chat or one.prompt == ids
        assert one.usage["prompt_tokens"] == len(one.prompt)
        assert one.usage["completion_tokens"] == TOKENS
        return one


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    model = make_model("gqa", folder)
    shared = {"lease_s": 3.0, "require": ["tcp"]}
    first, second = (
        engine(model, folder, f"decode-{core}", core, shared) for core in range(2)
    )
    decode = [f"--decode={one.url}={one.kv}" for one in (first, second)]
    proxy = front(folder, "--migrate", *decode)
    with running(first, second, proxy):
        yield Two((first, second), proxy)


def test_a_request_moves_there_and_back(two: Two) -> None:
    """All blocks but the last are fetched; tokens are those of an unmoved run."""
    for seed, length in enumerate((40, 3500)):
        before = sum(one.metric(FETCHED) for one in two.engines)

        def twice() -> None:
            for _ in range(2):
                said = two.proxy.post("/migrate", engine=two.at_work().url)
                assert said.status_code == 200, said.text

        said = two.right(prompt(length, 100 + seed), 12, twice)
        fetched = sum(one.metric(FETCHED) for one in two.engines) - before
        assert fetched >= length
        print(f"{length} tokens: longest pause {said.pause}")
    assert eventually(lambda: all(one.idle for one in two.engines))


def test_a_chat_moves(two: Two) -> None:
    """It goes on as a completion, of the same tokens."""

    def move() -> None:
        said = two.proxy.post("/migrate", engine=two.at_work().url)
        assert said.status_code == 200, said.text

    two.right(prompt(900, 150), 12, move, chat=True)


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_is_no_stream_moves(two: Two, chat: bool) -> None:
    """Its client gets what one engine alone answers, in one piece."""
    path, body = asking(prompt(900, 170 + chat), chat=chat)
    said: list[Any] = []
    waiting = threading.Thread(target=lambda: said.append(two.proxy.post(path, **body)))
    waiting.start()

    def moved() -> bool:
        """It has to have a token first."""
        with contextlib.suppress(StopIteration):
            here = two.at_work()
            return bool(two.proxy.post("/migrate", engine=here.url).status_code == 200)
        return False

    assert eventually(moved)
    waiting.join()
    assert said[0].status_code == 200, said[0].text
    answer = said[0].json()
    (choice,) = answer["choices"]
    tokens = (answer if chat else choice)["prompt_token_ids"]
    alone = two.engines[0].generate(tokens, TOKENS, cache_salt=f"alone {chat}")
    assert choice["token_ids"] == tokens_of(alone)
    assert answer["usage"]["completion_tokens"] == TOKENS
    assert (choice["message"]["content"] if chat else choice["text"]).strip()


def test_a_drained_engine_is_empty_before_its_request_is_over(two: Two) -> None:
    def drain() -> None:
        here = two.at_work()
        said = two.proxy.post("/drain", engine=here.url, wait_s=60)
        assert said.json() == {"engine": here.url, "running": 0}
        assert two.at_work() is not here
        two.proxy.post("/drain", engine=here.url, drain=False)

    two.right(prompt(900, 200), 12, drain)


@pytest.mark.parametrize("who", ["target", "source"])
def test_an_engine_is_killed_while_a_request_moves(two: Two, who: str) -> None:
    """No token is lost or doubled, whichever it is."""
    killed: list[Engine] = []

    def kill() -> None:
        here = two.at_work()
        there = two.engines[here is two.engines[0]]
        killed.append(here if who == "source" else there)
        moving = threading.Thread(
            target=two.proxy.post, args=("/migrate",), kwargs={"engine": here.url}
        )
        moving.start()
        killed[0].kill()
        moving.join()

    one = two.right(prompt(2000, 300 + len(who)), 12, kill)
    assert len(one.tokens) == TOKENS
    killed[0].start()
    killed[0].wait()
