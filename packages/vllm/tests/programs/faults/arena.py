"""Engines on two hosts, a wire between them that can be broken, and who asks them.

The hosts are network namespaces, so that a cut hits whatever a connector opens.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from kvwire.security.keys import read_key_file
from kvwire_vllm.references import References
from packages.vllm.tests.programs.bench.wire import Host, two_hosts
from packages.vllm.tests.programs.faults import bystanders
from packages.vllm.tests.programs.faults.answers import Outcome, Reference, judged
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import (
    Engine,
    Front,
    Process,
    complete,
    front,
    metric_of,
    prompt,
    server,
)
from tests.support.servers import free_port

DECODE: Final = "decode"
LEASE_S: Final = 6
# Of an answer that has not come, it is said that it never will.
HANG_S: Final = 60.0
SETTLES_WITHIN_S: Final = LEASE_S + 20.0
TOGETHER: Final = 12
TOKENS: Final = 8
BLOCK_TOKENS: Final = 32
BLOCKS: Final = 640
"""Blocks in each engine: few, so that they are soon used again."""

LENGTHS: Final = (40, 130, 300, 520, 700)
_PROMPTS: Final = 30
# What all prompts begin with; and so many prompts, and so few blocks, that prefill has
# none of them any more when it comes again.
_SYSTEM_TOKENS: Final = 8 * BLOCK_TOKENS
_PROMPTS_SHARED: Final = 120
_BLOCKS_SHARED: Final = BLOCKS // 2
# Decode has room for all that can wait for prefill, and forgets all before each fault.
_BLOCKS_WAITING: Final = 8192
_NORMAL, _SLOW = "1gbit", "32mbit"
# Tokens of an answer as numbers, since a word of two tokens would be one.
_NAMED: Final = {"return_tokens_as_token_ids": True}
Params = dict[str, Any]
# Changes a reference, and signs it again.
Forge = Callable[[Params, References], Params]


@dataclass(frozen=True, slots=True)
class Contender:
    """A connector."""

    name: str  # in the table
    # Its `kv-transfer-config`, given the host, where it listens, and the server's URL.
    config: Callable[[Host, str, str], dict[str, Any]]
    unknown: Forge  # makes a reference to what was never there
    out_of_range: Forge  # makes one whose numbers mean nothing
    environment: Mapping[str, str] = field(default_factory=dict)  # of its engines


@dataclass(frozen=True, slots=True)
class Setting:
    """How the engines are set up, and asked."""

    name: str  # in the table, behind the connector's
    prefills: int = 1  # engines that prefill; the first one is harmed
    # All prompts begin alike, both engines keep what they had, and a proxy asks them at
    # once; else neither keeps anything, and they are asked in sequence.
    shared: bool = False

    def blocks(self, name: str) -> int:
        """Return how many blocks an engine has."""
        if not self.shared:
            return BLOCKS
        return _BLOCKS_WAITING if name == DECODE else _BLOCKS_SHARED


SETTINGS: Final = {
    "plain": Setting(""),
    "shared-1": Setting(", shared prompt, 1 prefill", shared=True),
    "shared-2": Setting(", shared prompt, 2 prefill", prefills=2, shared=True),
}


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)  # how many of each
    slowest_s: float = 0.0  # the longest that one took
    crashes: int = 0  # engines that ended, or had to be, without being killed
    leaked: int = 0  # blocks that were in use when nobody used them
    harmed: int = 0  # bystanders' requests that failed, or were answered wrongly
    rewound: int = 0  # requests that vLLM set back though all of theirs was there
    again: int = 0  # tokens of prompts that decode has computed


class Arena:
    """Engines of a contender that are asked, and harmed."""

    def __init__(
        self,
        contender: Contender,
        setting: Setting,
        hosts: tuple[Host, Host],
        engines: Sequence[Engine],
        proxy: Front | None = None,
    ) -> None:
        self.contender = contender
        self.setting = setting
        *self.prefills, self.decode = engines
        self.prefill = self.prefills[0]  # that is harmed
        self.tally = Tally()  # where outcomes are counted
        self._proxy = proxy
        self._hosts = hosts
        key = hosts[0].trust["psk_file"]
        self.signer = References([read_key_file(key)])
        # One for all: making one takes 40 ms.
        self._client = httpx.Client(
            timeout=HANG_S,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        )
        self.bystanders: list[Reference] = []  # what nothing is done to
        self._known: list[Reference] = []
        self._long: list[Reference] = []
        self._system = prompt(_SYSTEM_TOKENS, seed=97) if setting.shared else []
        self._rate = 0.0
        self._asked = 0  # so that each fault goes on with other prompts
        self._leaked = 0
        self._computed = 0
        self._log = bystanders.DecodeLog(self.decode.log)
        self._lock = threading.Lock()
        self.killing = False  # decode is killed, so that errors are no connector's
        self._decode_is_up = threading.Event()
        self._decode_is_up.set()

    # --- what is asked ------------------------------------------------------------

    def learn(self) -> None:
        """Have one engine alone say what is right."""
        for number in range(_PROMPTS_SHARED if self._system else _PROMPTS):
            ids = prompt(LENGTHS[number % len(LENGTHS)], seed=number)
            self._known.append(self._learned(ids, TOKENS))
        if self._system:
            own = [self._learned(ids, bystanders.TOKENS) for ids in bystanders.PROMPTS]
            self.bystanders = own

    def _learned(self, ids: Sequence[int], tokens: int) -> Reference:
        """Have one engine alone answer a prompt, behind what all begin with."""
        ids = [*self._system, *ids]
        said = self.post(self.prefill, ids, None, tokens, logprobs=2, **_NAMED)
        return Reference.of(ids, said)

    def rate(self) -> float:
        """Return how many long prompts the prefill engines compute in a second."""
        if not self._rate:
            began = time.monotonic()

            def one(number: int) -> None:
                engine = self.prefills[number % len(self.prefills)]
                ids = [*self._system, *prompt(LENGTHS[-1], seed=2000 + number)]
                self.post(engine, ids, None, 1)

            self.together(2 * TOGETHER, one)
            self._rate = 2 * TOGETHER / (time.monotonic() - began)
        return self._rate

    def long_ones(self, count: int) -> Sequence[Reference]:
        """Return so many of the longest prompts, none of which was asked before."""
        first = 3000 + len(self._long)
        seeds = range(first, first + count)
        with ThreadPoolExecutor(TOGETHER) as pool:
            new = pool.map(
                lambda seed: self._learned(prompt(LENGTHS[-1], seed), TOKENS), seeds
            )
            self._long += new
        return self._long[-count:]

    def known(self, number: int) -> Reference:
        return self._known[(self._asked + number) % len(self._known)]

    def alone(self, number: int) -> None:
        """Have prefill compute and answer a prompt."""
        self.post(self.prefill, self.known(number).ids, None)

    def prefilled(self, known: Reference) -> Params | None:
        """Have a prompt computed; what decode is told, or None without an engine."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        try:
            said = self.post(self.prefill, known.ids, asked, 1)
        except httpx.HTTPError:
            return None
        params: Params | None = said["kv_transfer_params"]
        return params

    def decoded(
        self,
        known: Reference,
        params: Params | None,
        patience_s: float = HANG_S,
        at: Process | None = None,
    ) -> None:
        """Have a prompt answered, note what came of it."""
        began = time.monotonic()
        try:
            who = at or self.decode
            said = self.post(who, known.ids, params, timeout=patience_s)
            outcome = judged(known, said)
        except httpx.TimeoutException:
            outcome = Outcome.HANG if patience_s == HANG_S else Outcome.LEFT
        except httpx.HTTPError:
            outcome = Outcome.KILLED if self.killing else Outcome.ERROR
        with self._lock:
            self.tally.outcomes[outcome.value] += 1
            took_s = time.monotonic() - began
            if outcome is not Outcome.LEFT:
                self.tally.slowest_s = max(self.tally.slowest_s, took_s)

    def through(self, number: int) -> None:
        """Ask both, as a router does; decode alone where prefill does not answer."""
        self.routed(self.known(number))

    def routed(self, known: Reference) -> None:
        """Ask for one prompt in the way of the setting."""
        params = None if self._proxy else self.prefilled(known)
        self._decode_is_up.wait()
        self.decoded(known, params, at=self._proxy)

    def together(
        self,
        count: int,
        ask: Callable[[int], object],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Ask so many times, a few at once."""
        harming = threading.Thread(target=meanwhile) if meanwhile else None

        def one(number: int) -> None:
            if harming is not None and number == count // 3:
                harming.start()
            ask(number)

        with ThreadPoolExecutor(TOGETHER) as pool:
            for _ in pool.map(one, range(count)):
                pass
        if harming is not None:
            harming.join()
        self._asked += count

    def arriving(self, count: int, ask: Callable[[int], object], rate: float) -> None:
        """Ask so many times at a rate, however many are under way."""
        with ThreadPoolExecutor(count) as pool:
            began = time.monotonic()
            asked = []
            for number in range(count):
                early_s = began + number / rate - time.monotonic()
                threading.Event().wait(max(0.0, early_s))
                asked.append(pool.submit(ask, number))
            for one in asked:
                one.result()

    def post(
        self,
        engine: Process,
        ids: Sequence[int],
        params: Params | None,
        tokens: int = TOKENS,
        **more: Any,
    ) -> Any:
        asked = {"timeout": HANG_S, "client": self._client, **more}
        if params:
            asked["kv_transfer_params"] = params
        return complete(engine.url, ids, tokens, **asked)

    # --- what is done to them -----------------------------------------------------

    def restart(self, engine: Engine) -> None:
        if engine is self.decode:
            self.killing = True
            self._decode_is_up.clear()
        engine.kill()
        engine.start()
        engine.wait()
        self.killing = False
        self._decode_is_up.set()

    @contextmanager
    def cut(self, *ways: int) -> Iterator[None]:
        """Lose every packet that a host sends, until the end of the block."""
        for way in ways:
            # To an address of nobody: whoever gets the frame drops it silently.
            self._neighbour(way, "replace", "lladdr", "02:00:00:00:00:99", "permanent")
        try:
            yield
        finally:
            for way in ways:
                self._neighbour(way, "delete")

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Let 4 MB/s pass, until the end of the block."""
        self._limit(_SLOW)
        try:
            yield
        finally:
            self._limit(_NORMAL)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have bystanders, if there are any, and count what became of all."""
        if self._system:
            forgotten = self.decode.post("/reset_prefix_cache")
            forgotten.raise_for_status()
        for known in self.bystanders:  # so that decode has what all begin with
            self.post(self.decode, known.ids, None, 1)
        self._computed = self._locally()
        with bystanders.Bystanders(self) as others:
            yield
        self.tally.harmed += others.harmed
        self._computed += others.computed
        computed = self._locally()
        # It counts from 0 again when it was restarted.
        new = computed >= self._computed
        self.tally.again += computed - self._computed if new else computed
        self._settle()
        self.tally.rewound += self._log.rewound()

    def await_decode(self) -> None:
        """Return when decode is not being restarted."""
        self._decode_is_up.wait()

    def _locally(self) -> int:
        """Return how many tokens of prompts decode has computed, and not fetched."""
        try:
            text = self.decode.metrics()
        except httpx.HTTPError:
            return 0  # it has ended
        lost = metric_of(text, "vllm:kvwire_missing_blocks_sum") * BLOCK_TOKENS
        source = "vllm:prompt_tokens_by_source_total", 'source="local_compute"'
        return round(lost + metric_of(text, *source))

    def _settle(self) -> None:
        """See what is left behind, and have all engines well again."""
        engines = (*self.prefills, self.decode)
        dead = [engine for engine in engines if not self._well(engine)]
        for engine in dead:
            self.tally.crashes += 1
            self.restart(engine)
        if dead:
            self._leaked = 0
        end = time.monotonic() + SETTLES_WITHIN_S
        while not all(map(_idle, engines)) and time.monotonic() < end:
            threading.Event().wait(0.2)
        leaked = round(sum(map(self._used, engines)))
        self.tally.leaked += max(0, leaked - self._leaked)
        self._leaked = leaked

    def _used(self, engine: Engine) -> float:
        name = DECODE if engine is self.decode else ""
        try:
            used = engine.metric("vllm:kv_cache_usage_perc")
        except httpx.HTTPError:
            return 0.0
        return used * self.setting.blocks(name)

    def _well(self, engine: Engine) -> bool:
        assert engine.running is not None
        if engine.running.poll() is not None:
            return False
        try:
            said = self.post(engine, self.known(0).ids, None)
        except httpx.HTTPError:
            return False
        return judged(self.known(0), said) is not Outcome.WRONG

    def _neighbour(self, way: int, verb: str, *more: str) -> None:
        there = self._hosts[1 - way].kv
        words = ("ip", "neighbour", verb, there, *more[:2], "dev", "wire")
        if more:
            words += ("nud", more[2])
        subprocess.run([*self._hosts[way].prefix, *words], check=True)

    def _limit(self, rate: str) -> None:
        for host in self._hosts:
            words = ("tc", "qdisc", "replace", "dev", "wire", "root", "tbf", "rate")
            limits = ("burst", "256k", "limit", "8mb")
            subprocess.run([*host.prefix, *words, rate, *limits], check=True)


@contextmanager
def arena(contender: Contender, setting: Setting, kind: str) -> Iterator[Arena]:
    """Engines of a model that serve, until the end of the block."""
    with ExitStack() as stack:
        folder = _folder(contender, kind)
        model = make_model(kind, folder)
        hosts = stack.enter_context(two_hosts(_NORMAL, folder))
        places = [(f"prefill-{n}", hosts[0]) for n in range(setting.prefills)]
        engines = [
            _engine(contender, setting, model, folder, name, host)
            for name, host in (*places, (DECODE, hosts[1]))
        ]
        proxy = _proxy(hosts[0], folder, engines) if setting.shared else None
        stack.enter_context(running(*engines, *filter(None, (proxy,))))
        made = Arena(contender, setting, hosts, engines, proxy)
        made.learn()
        yield made


def _proxy(host: Host, folder: Path, engines: Sequence[Engine]) -> Front:
    *prefills, decode = [f"{one.url}={one.kv}" for one in engines]
    said = ["--psk-file", host.trust["psk_file"], "--decode", decode]
    return front(folder, *said, *(f"--prefill={one}" for one in prefills))


def _folder(contender: Contender, kind: str) -> Path:
    path = Path("build", "faults", f"{contender.name}-{kind}").resolve()
    path.mkdir(parents=True, exist_ok=True)
    (path / "key").unlink(missing_ok=True)
    return path


def _engine(
    contender: Contender,
    setting: Setting,
    model: Path,
    folder: Path,
    name: str,
    host: Host,
) -> Engine:
    port, kv = free_port(), free_port()
    url = f"http://{host.http}:{port}"
    log = folder / f"{name}.log"
    log.unlink(missing_ok=True)
    environment = {
        # One process and one thread: two engines and more share two cores.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # it can be told to forget prompts
        **host.engine_environment(kv),
        **contender.environment,
    }
    made = server(
        model,
        log,
        url,
        contender.config(host, f"{host.kv}:{kv}", url),
        *("--max-model-len", "1024", "--dtype", "float32"),
        *("--block-size", str(BLOCK_TOKENS)),
        *("--num-gpu-blocks-override", str(setting.blocks(name))),
        f"--{'' if setting.shared else 'no-'}enable-prefix-caching",
        *("--logprobs-mode", "raw_logits", "--distributed-executor-backend", "uni"),
        *("--disable-uvicorn-access-log", "--enable-prompt-tokens-details"),
        prefix=host.prefix,
        **environment,
    )
    made.kv = f"{host.kv}:{kv}"
    return made


def _idle(engine: Engine) -> bool:
    try:
        return engine.idle
    except httpx.HTTPError:
        return False
