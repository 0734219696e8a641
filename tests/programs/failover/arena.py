"""Two engines that decode over one store server, the proxy before them, and streams."""

from __future__ import annotations

import contextlib
import itertools
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.support.engines.fleets import Stream
from tests.support.engines.pairs import running
from tests.support.engines.serving import (
    Engine,
    Front,
    before,
    engine,
    front,
    metric_of,
    prompt,
    tokens_of,
)
from tests.support.engines.store_server import StoreServer
from tests.support.waiting import eventually

BLOCK_TOKENS: Final = 128
# Tokens of a step that was under way: the last one that was sampled, and the one before
# it, which vLLM had scheduled ahead.
STEP_TOKENS: Final = 2
# An engine that was asked to stop is to be gone by then.
GONE_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The streams of a round, each of another prompt."""

    prompts: list[list[int]]
    tokens: int
    answers: list[list[int]]  # each prompt's, by one engine that is left alone

    @classmethod
    def of(cls, streams: int, tokens: int, seed: int, by: Engine) -> Workload:
        """Make prompts, and have an engine answer them from KV of its own."""
        prompts = [prompt(40 + 97 * at, seed + at) for at in range(streams)]

        def answer(ids: list[int]) -> list[int]:
            return tokens_of(by.generate(ids, tokens, cache_salt="alone"))

        with ThreadPoolExecutor(streams) as pool:
            return cls(prompts, tokens, list(pool.map(answer, prompts)))


@dataclass(slots=True)
class Round:
    """One kill, and what became of the streams."""

    engine: int  # which one ended
    moved: int  # streams that it had
    at: float  # when it ended, on the clock of `tokens_at`
    wrong: int = 0  # streams of other tokens than one engine's uninterrupted answer
    lost: int = 0  # streams without an end
    computed: int = 0  # prompt tokens that the other engine computed
    step_s: float = 0.0  # the usual time between two tokens
    # The longest pause of each stream from that moment on, longest first.
    pauses_s: list[float] = field(default_factory=list)
    gone_s: float = 0.0  # until the engine's process was gone
    tokens_at: list[list[float]] = field(default_factory=list)  # by stream

    @property
    def bound(self) -> int:
        """The tokens of a block and a step of each stream that moved."""
        return self.moved * (BLOCK_TOKENS + STEP_TOKENS)

    @property
    def bad(self) -> bool:
        """Whether something happened that never may."""
        stayed = self.gone_s >= GONE_WITHIN_S
        return stayed or bool(self.wrong or self.lost or self.computed > self.bound)


@dataclass(slots=True)
class Arena:
    """What runs."""

    engines: list[Engine]
    server: StoreServer
    proxy: Front
    _rounds: Iterator[int] = field(default_factory=itertools.count)

    def round(self, work: Workload, at: int, how: signal.Signals) -> Round:
        """Read all streams, and end an engine once each of them has `at` tokens."""
        number = next(self._rounds)
        streams = [Stream() for _ in work.prompts]
        reached = threading.Semaphore(0)

        def read(stream: Stream, ids: list[int]) -> None:
            stream.read(
                *(self.proxy.url, ids, at, reached.release),
                tokens=work.tokens,
                cache_salt=f"round {number}",
            )

        with ThreadPoolExecutor(len(streams)) as pool:
            reads = [
                pool.submit(read, *one)
                for one in zip(streams, work.prompts, strict=True)
            ]
            for _ in streams:
                assert reached.acquire(timeout=120), "a stream has no tokens"
            victim = self._busiest()
            other = self.engines[1 - victim]
            had = computed(other)
            found = Round(victim, self._running(victim), time.monotonic())
            self._end(victim, how)
            found.gone_s = time.monotonic() - found.at
            found.lost = sum(one.exception() is not None for one in reads)
        for one in reads:
            if one.exception() is not None:
                print(f"lost: {one.exception()!r}")
        found.computed = computed(other) - had
        answers = zip(streams, work.answers, strict=True)
        found.wrong = sum(one.tokens != answer for one, answer in answers) - found.lost
        found.tokens_at = [one.at for one in streams]
        pairs = (pair for one in streams for pair in itertools.pairwise(one.at))
        # Tokens of one event have the same time.
        steps = [second - first for first, second in pairs if second > first]
        found.step_s = statistics.median(steps)
        longest = (pause_s(one.at, found.at) for one in streams)
        found.pauses_s = sorted(longest, reverse=True)
        return found

    def back(self) -> None:
        """Start the engine that has ended, and wait until it gets requests again."""
        for one in self.engines:
            if one.running is None:
                one.start()
                one.wait()
        wanted = {one.url for one in self.engines}
        assert eventually(lambda: self.proxy.engines("up") == wanted)

    def _busiest(self) -> int:
        return max((0, 1), key=self._running)

    def _running(self, number: int) -> int:
        said = httpx.get(f"{self.proxy.url}/fleet").json()
        url = self.engines[number].url
        return sum(url in one["engines"] for one in said["requests"])

    def _end(self, number: int, how: signal.Signals) -> None:
        one = self.engines[number]
        if how != signal.SIGKILL:
            assert one.running is not None
            one.running.send_signal(how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.running.wait(GONE_WITHIN_S)
        one.kill()


def computed(one: Engine) -> int:
    """The prompt tokens that an engine has computed itself."""
    name, source = "vllm:prompt_tokens_by_source_total", 'source="local_compute"'
    return int(metric_of(one.metrics(), name, source))


def connector(address: str, memory: str = "64MiB") -> dict[str, Any]:
    """The store connector, on the server at an address."""
    return {
        "kv_connector": "KvwireStoreConnector",
        "kv_connector_module_path": "kvwire.integrations.vllm_store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tiers": [f"memory:{memory}", f"kvwire://{address}"]
        },
    }


@contextmanager
def arena(model: Path, folder: Path) -> Iterator[Arena]:
    """Start all of it."""
    server = StoreServer(folder, memory="256MiB", disk="2GiB")
    try:
        store = connector(server.address)
        engines = [
            engine(model, folder, f"engine-{core}", core, {}, alone=store)
            for core in (0, 1)
        ]
        roles = ("decode", "decode")
        proxy = front(folder, *before(engines, roles), "--migrate")
        with running(*engines, proxy):
            made = Arena(engines, server, proxy)
            made.back()
            yield made
    finally:
        server.kill()


def pause_s(at: Sequence[float], since: float) -> float:
    """The longest time between two tokens of a stream, from some moment on."""
    pairs = itertools.pairwise(at)
    return max((second - first for first, second in pairs if second > since), default=0)
