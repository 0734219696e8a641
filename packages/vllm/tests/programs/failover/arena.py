"""Two engines that decode over one store server, the proxy before them, and streams."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from yarl import URL

from packages.vllm.tests.support.fleets import Stream
from packages.vllm.tests.support.nursery import Nursery
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import (
    Engine,
    Front,
    before,
    engine,
    front,
    metric_of,
    prompt,
    tokens_of,
)
from packages.vllm.tests.support.store_server import StoreServer
from tests.support.waiting import eventually

BLOCK_TOKENS: Final = 128
# Tokens of a step that was under way: the last one that was sampled, and the one before
# it, which vLLM had scheduled ahead.
STEP_TOKENS: Final = 2
# An engine that was asked to stop is to be gone by then.
GONE_WITHIN_S: Final = 60.0
# Tokens that a stream has left at the kill, so that its pause has an end.
AFTER_TOKENS: Final = 128
# What a stream may pause, beside the time until the kill can be noticed.
PAUSE_STEPS: Final = 10
NOTICED_WITHIN_S: Final = 1.0
# Of 128 tokens each: all streams of a round, and those of the round before.
_CACHE_BLOCKS: Final = "288"
_BEGINS_WITHIN_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Streams, each of another prompt."""

    prompts: list[list[int]]
    tokens: int
    answers: list[list[int]]  # each prompt's, by one engine that is left alone

    def cut(self, chance: random.Random, tokens: int) -> Workload:
        """Streams of so many tokens that begin somewhere in these answers.

        What comes before is in their prompts.
        """
        # Most are short, since a long prompt takes long to compute.
        most = self.tokens - tokens
        begins = [int(most * chance.random() ** 4) for _ in self.prompts]
        these = zip(self.prompts, self.answers, begins, strict=True)
        cut = [
            ([*ids, *answer[:at]], answer[at : at + tokens])
            for ids, answer, at in these
        ]
        return Workload([ids for ids, _ in cut], tokens, [said for _, said in cut])

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
    noticed_s: float = 0.0  # until the kernel had closed the engine's connections
    # From then on until a request's first token, at the other engine, on average.
    first_s: float = 0.0
    load: float = 0.0  # of the machine, with all that runs there
    # The longest pause of each stream from that moment on, longest first.
    pauses_s: list[float] = field(default_factory=list)
    # From that moment to the next token of each stream, longest first.
    resumed_s: list[float] = field(default_factory=list)
    # Of all streams: the longest time between two tokens around that moment, which has
    # the wait before it; and before, so what the machine's load does alone.
    around_s: float = 0.0
    before_s: float = 0.0
    gone_s: float = 0.0  # until the engine's process was gone
    tokens_at: list[list[float]] = field(default_factory=list)  # by stream

    def measure(self, tokens_at: Sequence[Sequence[float]]) -> None:
        """Find the pauses in the times of all streams' tokens."""
        self.tokens_at = [[round(one, 4) for one in at] for at in tokens_at]
        self.step_s = statistics.median(step_s(at) for at in tokens_at)
        pauses = (pause_s(at, self.at) for at in tokens_at)
        self.pauses_s = sorted(pauses, reverse=True)
        later = ([one - self.at for one in at if one > self.at] for at in tokens_at)
        self.resumed_s = sorted((min(one) for one in later if one), reverse=True)
        pairs = [pair for at in tokens_at for pair in itertools.pairwise(at)]
        spans = [(end, end - begin) for begin, end in pairs]
        self.around_s = max((s for end, s in spans if end > self.at), default=0.0)
        self.before_s = max((s for end, s in spans if end <= self.at), default=0.0)

    @property
    def bound(self) -> int:
        """The tokens of a block and a step of each stream that moved."""
        return self.moved * (BLOCK_TOKENS + STEP_TOKENS)

    @property
    def late(self) -> bool:
        """Whether a stream paused for longer than it should."""
        most_s = PAUSE_STEPS * self.step_s + NOTICED_WITHIN_S
        return any(one > most_s for one in self.pauses_s)

    @property
    def slow(self) -> bool:
        """Whether a stream had no token for ten steps after the kill was noticed."""
        most_s = PAUSE_STEPS * self.step_s + self.noticed_s
        return any(one > most_s for one in self.resumed_s)

    @property
    def bad(self) -> bool:
        """Whether something happened that never may."""
        stayed = self.gone_s >= GONE_WITHIN_S
        return stayed or bool(self.wrong or self.lost or self.computed > self.bound)


@dataclass(slots=True)
class Watched(Stream):
    """A stream, and whoever waits for its tokens."""

    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, line: str) -> None:
        """Take in a line of the answer."""
        Stream.take(self, line)
        with self.changed:
            self.changed.notify_all()


@dataclass(slots=True)
class Arena:
    """What runs."""

    engines: list[Engine]
    server: StoreServer
    proxy: Front
    _rounds: Iterator[int] = field(default_factory=itertools.count)

    def round(self, work: Workload, at: int, how: signal.Signals) -> Round:
        """Read all streams, and end an engine once one of them has `at` tokens."""
        number = next(self._rounds)
        changed = threading.Condition()
        streams = [Watched(changed=changed) for _ in work.prompts]

        def read(stream: Watched, ids: list[int]) -> None:
            stream.read(
                *(self.proxy.url, ids, 1, lambda: None),
                tokens=work.tokens,
                cache_salt=f"round {number}",
            )

        def wait_for(reached: Callable[[], bool]) -> None:
            with changed:
                assert changed.wait_for(reached, _BEGINS_WITHIN_S), "no more tokens"

        with ThreadPoolExecutor(len(streams)) as pool:
            reads = [
                pool.submit(read, *one)
                for one in zip(streams, work.prompts, strict=True)
            ]
            wait_for(lambda: all(one.tokens for one in streams))
            # The engines take turns.
            victim = number % 2 if self._running(number % 2) else 1 - number % 2
            before = Figures.of(self.engines[1 - victim])
            wait_for(lambda: max(len(one.tokens) for one in streams) >= at)
            found = self._kill(victim, how)
            found.lost = sum(one.exception() is not None for one in reads)
        for one in reads:
            if one.exception() is not None:
                print(f"lost: {one.exception()!r}")
        after = Figures.of(self.engines[1 - found.engine])
        found.computed = after.computed - before.computed
        found.first_s = after.first_s - before.first_s
        found.first_s /= max(1, after.firsts - before.firsts)
        answers = zip(streams, work.answers, strict=True)
        found.wrong = sum(one.tokens != answer for one, answer in answers) - found.lost
        found.measure([one.at for one in streams])
        return found

    def back(self) -> None:
        """Start the engine that has ended, and wait until it gets requests again."""
        for one in self.engines:
            if one.running is None:
                one.start()
                one.wait()
        wanted = {one.url for one in self.engines}
        assert eventually(lambda: self.proxy.engines("up") == wanted)

    def _kill(self, victim: int, how: signal.Signals) -> Round:
        """End an engine, and wait until it is gone."""
        one = self.engines[victim]
        assert one.running is not None
        where = URL(one.url)
        with socket.create_connection((where.host, where.port)) as link:
            link.settimeout(GONE_WITHIN_S)
            moved = self._running(victim)
            found = Round(victim, moved, time.monotonic(), load=os.getloadavg()[0])
            if how == signal.SIGKILL:
                os.killpg(one.running.pid, how)
            else:
                one.running.send_signal(how)
            with contextlib.suppress(ConnectionError, TimeoutError):
                link.recv(1)
        found.noticed_s = time.monotonic() - found.at
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.running.wait(GONE_WITHIN_S)
        one.kill()
        found.gone_s = time.monotonic() - found.at
        return found

    def _running(self, number: int) -> int:
        said = httpx.get(f"{self.proxy.url}/fleet").json()
        url = self.engines[number].url
        return sum(url in one["engines"] for one in said["requests"])


@dataclass(frozen=True, slots=True)
class Figures:
    """What an engine counts."""

    computed: int  # prompt tokens that it has computed itself
    first_s: float  # the time to the first token of all requests
    firsts: int  # how many they are

    @classmethod
    def of(cls, one: Engine) -> Figures:
        """Read them."""
        text = one.metrics()
        name, source = "vllm:prompt_tokens_by_source_total", 'source="local_compute"'
        first = "vllm:time_to_first_token_seconds"
        return cls(
            int(metric_of(text, name, source)),
            metric_of(text, f"{first}_sum"),
            int(metric_of(text, f"{first}_count")),
        )


def connector(address: str, memory: str = "64MiB") -> dict[str, Any]:
    """The store connector, on the server at an address."""
    return {
        "kv_connector": "KvwireStoreConnector",
        "kv_connector_module_path": "kvwire_vllm.store.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tiers": [f"memory:{memory}", f"kvwire://{address}"]
        },
    }


@contextmanager
def arena(model: Path, folder: Path, *, forked: bool = True) -> Iterator[Arena]:
    """Start all of it; engines are started as forks, or as commands."""
    server = StoreServer(folder, memory="256MiB", disk="2GiB")
    few = ("--num-gpu-blocks-override", _CACHE_BLOCKS)
    try:
        store = connector(server.address)
        engines = [
            engine(model, folder, f"engine-{core}", core, {}, *few, alone=store)
            for core in (0, 1)
        ]
        roles = ("decode", "decode")
        proxy = front(folder, *before(engines, roles), "--migrate")
        with ExitStack() as stack:
            starter = stack.enter_context(Nursery()).start if forked else None
            stack.enter_context(running(*engines, proxy, starter=starter))
            made = Arena(engines, server, proxy)
            made.back()
            yield made
    finally:
        server.kill()


def step_s(at: Sequence[float]) -> float:
    """The usual time between two tokens of a stream: a mean, without its longest pause.

    Several tokens come at once if the reader was late.
    """
    pauses = sorted(second - first for first, second in itertools.pairwise(at))
    return statistics.mean(pauses[:-1]) if len(pauses) > 1 else 0.0


def pause_s(at: Sequence[float], since: float) -> float:
    """The longest time without a token of a stream, from some moment on."""
    pairs = itertools.pairwise(at)
    pauses = (second - max(first, since) for first, second in pairs if second > since)
    return max(pauses, default=0.0)
