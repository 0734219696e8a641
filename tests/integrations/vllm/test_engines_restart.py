"""Two and two real vLLM engines under load: restarted in turn, and killed for good."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

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

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(3600)]
RIGHT = "right"
ROLES = ("prefill", "decode", "prefill", "decode")
CLIENTS, TOKENS = 6, 8
# What all prompts begin with; decode keeps it, and prompts.
SYSTEM = prompt(256, seed=98)
# Answers after the last prefill engine has been killed.
LEAST = 60


@dataclass(frozen=True, slots=True)
class Fleet:
    engines: list[Engine]
    proxy: Front  # finds them in a directory
    listing: Front  # has them listed, so it never hears that one is gone
    known: list[tuple[list[int], list[int]]]  # prompts, and what is right

    def of(self, role: str) -> list[Engine]:
        return [
            one for one, said in zip(self.engines, ROLES, strict=True) if said == role
        ]

    def ask(self, proxy: Front, number: int) -> str:
        """What became of one request: right, or why not. Some are streamed."""
        ids, want = self.known[number % len(self.known)]
        body = asked(TOKENS, prompt=ids, stream=not number % 3)
        said = httpx.post(
            f"{proxy.url}/v1/completions", json=body, timeout=ANSWERS_WITHIN_S
        )
        if said.status_code != 200:
            return f"{said.status_code}: {said.text}"
        if not body["stream"]:
            return RIGHT if tokens_of(said.json()) == want else "wrong"
        got: list[int] = []
        for line in said.text.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"broken off: {event}"
                got += event["choices"][0]["token_ids"] or []
        return RIGHT if got == want else "wrong"

    def load(
        self, work: Callable[[Counter[str]], None], *proxies: Front
    ) -> Counter[str]:
        """Ask, several clients at once, while some work is done."""
        over, lock = threading.Event(), threading.Lock()
        outcomes: Counter[str] = Counter()

        def ask_on(client: int) -> None:
            number = client
            while not over.is_set():
                outcome = self.ask(proxies[number % len(proxies)], number)
                with lock:
                    outcomes[outcome] += 1
                number += CLIENTS + 1

        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(ask_on, client) for client in range(CLIENTS)]
            try:
                work(outcomes)
            finally:
                over.set()
            for one in asking:
                one.result()
        return outcomes

    def restart(self, one: Engine) -> None:
        """As an operator does: drain it, end it, start it."""
        said = self.proxy.post("/drain", engine=one.url, wait_s=ANSWERS_WITHIN_S)
        assert said.json() == {"engine": one.url, "running": 0}
        assert one.running is not None
        one.running.send_signal(signal.SIGTERM)
        one.running.wait(ANSWERS_WITHIN_S)
        one.start()
        one.wait()
        assert eventually(lambda: one.url in self.proxy.engines("up"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("restart")
    model = make_model("gqa", folder)
    url = f"file:{folder}/directory"
    with ExitStack() as stack:
        engines = [
            engine(
                *(model, folder, f"{role}-{core}", core),
                {"lease_s": 3.0, "require": ["tcp"], "directory": url, "role": role},
            )
            for core, role in enumerate(ROLES)
        ]
        proxy = front(folder, "--directory", url)
        listed = [
            f"--{role}={one.url}={one.kv}"
            for role, one in zip(ROLES, engines, strict=True)
        ]
        listing = front(folder, *listed)
        stack.enter_context(running(*engines, proxy, listing))
        prompts = [[*SYSTEM, *prompt(40 + 20 * seed, seed)] for seed in range(30)]
        known = [(ids, tokens_of(engines[0].generate(ids, TOKENS))) for ids in prompts]
        wanted = {one.url for one in engines}
        assert eventually(lambda: proxy.engines("up") == wanted)
        yield Fleet(engines, proxy, listing, known)


def test_no_request_is_refused_while_engines_restart_one_by_one(fleet: Fleet) -> None:
    def restart_all(_: Counter[str]) -> None:
        for one in fleet.engines:
            fleet.restart(one)

    outcomes = fleet.load(restart_all, fleet.proxy)
    print(dict(outcomes))
    assert outcomes.keys() == {RIGHT}


def test_no_request_is_refused_when_prefill_is_killed_for_good(fleet: Fleet) -> None:
    """One engine, and then the other: decode engines answer alone."""

    def kill(outcomes: Counter[str]) -> None:
        for one in fleet.of("prefill"):
            one.kill()
            wanted = outcomes.total() + LEAST
            while outcomes.total() < wanted:
                threading.Event().wait(0.1)

    outcomes = fleet.load(kill, fleet.proxy, fleet.listing)
    print(dict(outcomes))
    assert outcomes.keys() == {RIGHT}
