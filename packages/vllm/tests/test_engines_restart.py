"""Two and two real vLLM engines under load: restarted in turn, and killed for good."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from packages.vllm.tests.support.fleets import Fleet, Stream, asking, fleet_of
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import (
    NEEDS_VLLM,
    Front,
    before,
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
class Loaded:
    fleet: Fleet  # the proxy finds the engines in a directory
    listing: Front  # has them listed, so it never hears that one is gone
    known: list[tuple[list[int], list[int]]]  # prompts, and what is right

    def ask(self, proxy: Front, number: int) -> str:
        """What became of one request: right, or why not. Some are streamed."""
        ids, want = self.known[number % len(self.known)]
        path, body = asking(ids, TOKENS)
        body["stream"] = not number % 3
        said = proxy.post(path, **body)
        if said.status_code != 200:
            return f"{said.status_code}: {said.text}"
        if not body["stream"]:
            return RIGHT if tokens_of(said.json()) == want else "wrong"
        stream = Stream()
        try:
            for line in said.text.splitlines():
                stream.take(line)
        except AssertionError as exc:
            return f"broken off: {exc}"
        return RIGHT if stream.tokens == want else "wrong"

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


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("restart")
    model = make_model("gqa", folder)
    url = f"file:{folder}/directory"
    (folder / "listing").mkdir()
    with fleet_of(model, folder, ROLES, directory=url) as fleet:
        listing = front(folder / "listing", *before(fleet.engines, ROLES))
        with running(listing):
            prompts = [[*SYSTEM, *prompt(40 + 20 * seed, seed)] for seed in range(30)]
            first = fleet.engines[0]
            known = [(ids, tokens_of(first.generate(ids, TOKENS))) for ids in prompts]
            yield Loaded(fleet, listing, known)


def test_no_request_is_refused_while_engines_restart_one_by_one(
    loaded: Loaded,
) -> None:
    def restart_all(_: Counter[str]) -> None:
        for one in loaded.fleet.engines:
            loaded.fleet.restart(one)

    outcomes = loaded.load(restart_all, loaded.fleet.proxy)
    print(dict(outcomes))
    assert outcomes.keys() == {RIGHT}
    engines = loaded.fleet.shown().values()
    assert {one["role"] for one in engines} == set(ROLES)
    assert all("tcp" in one["transports"] for one in engines)
    # What the transfers were on, which engines announce within a second.
    assert eventually(
        lambda: any(
            one["labels"].get("carrying", "").startswith("tcp:")
            for one in loaded.fleet.shown().values()
        )
    )


def test_no_request_is_refused_when_prefill_is_killed_for_good(loaded: Loaded) -> None:
    """One engine, and then the other: decode engines answer alone."""

    def kill(outcomes: Counter[str]) -> None:
        for one in loaded.fleet.of("prefill"):
            one.kill()
            wanted = outcomes.total() + LEAST
            while outcomes.total() < wanted:
                threading.Event().wait(0.1)

    outcomes = loaded.load(kill, loaded.fleet.proxy, loaded.listing)
    print(dict(outcomes))
    assert outcomes.keys() == {RIGHT}
