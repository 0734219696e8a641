"""Requests that go on at another of two real vLLM engines: moved, drained, killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from packages.vllm.tests.support.fleets import (
    TOKENS,
    Fleet,
    Stream,
    asking,
    fleet_of,
    own,
)
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.serving import NEEDS_VLLM, Engine, prompt
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("two")
    model = make_model("gqa", folder)
    with fleet_of(model, folder, ("decode", "decode"), "--migrate") as fleet:
        yield fleet


def test_a_request_moves_there_and_back(two: Fleet) -> None:
    """All blocks but the last are fetched; tokens are those of an unmoved run."""
    for seed, length in enumerate((40, 3500)):
        before = two.fetched

        def twice() -> None:
            two.migrate()
            two.migrate()

        said = two.check_stream(prompt(length, 100 + seed), 12, twice)
        assert two.fetched - before >= length
        print(f"{length} tokens: longest pause {said.pause}")
    assert eventually(lambda: all(one.idle for one in two.engines))


def test_a_chat_moves(two: Fleet) -> None:
    """It goes on as a completion, of the same tokens."""
    two.check_stream(prompt(900, 150), 12, two.migrate, chat=True)


def test_a_chat_without_a_limit_moves(two: Fleet) -> None:
    """It ends with the context, although what it goes on as needs a limit."""
    one = Stream(chat=True)
    one.read(two.proxy.url, prompt(3400, 151), 12, two.migrate, max_tokens=None)
    models = httpx.get(f"{two.engines[0].url}/v1/models").json()["data"]
    assert len(one.prompt) + len(one.tokens) == models[0]["max_model_len"]
    assert one.tokens == own(two.engines[0], one.prompt, len(one.tokens))


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_in_one_piece_stays(two: Fleet, chat: bool) -> None:
    """An operator is told so, and the client gets what one engine alone answers."""
    path, body = asking(prompt(900, 170 + chat), chat=chat)
    said: list[Any] = []
    waiting = threading.Thread(target=lambda: said.append(two.proxy.post(path, **body)))
    waiting.start()
    told = two.proxy.post("/migrate", engine=two.at_work().url)
    waiting.join()
    assert told.status_code == 409, told.text
    (one,) = told.json()["requests"]
    assert one["stayed"] == "its client gets the answer in one piece"
    assert said[0].status_code == 200, said[0].text
    answer = said[0].json()
    (choice,) = answer["choices"]
    tokens = (answer if chat else choice)["prompt_token_ids"]
    assert choice["token_ids"] == own(two.engines[0], tokens, TOKENS)


def test_a_drained_engine_is_empty_before_its_request_is_over(two: Fleet) -> None:
    def drain() -> None:
        here = two.at_work()
        two.drain(here)
        assert two.at_work() is not here
        two.proxy.post("/drain", engine=here.url, drain=False)

    two.check_stream(prompt(900, 200), 12, drain)


@pytest.mark.parametrize("who", ["target", "source"])
def test_an_engine_is_killed_while_a_request_moves(two: Fleet, who: str) -> None:
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

    one = two.check_stream(prompt(2000, 300 + len(who)), 12, kill)
    assert len(one.tokens) == TOKENS
    killed[0].start()
    killed[0].wait()
