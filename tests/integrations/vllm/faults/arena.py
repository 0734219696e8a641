"""Two engines on two hosts, a wire between them that can be broken, and who asks them.

The hosts are network namespaces, so that a cut hits whatever a connector opens.
"""

from __future__ import annotations

import os
import signal
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

from kvwire.integrations.vllm.references import References
from kvwire.security.keys import read_key_file
from tests.bench.vllm_wire import Host, two_hosts
from tests.integrations.vllm.faults.answers import Outcome, Reference, judged
from tests.integrations.vllm.models import make_model
from tests.integrations.vllm.pairs import running
from tests.integrations.vllm.serving import Engine, complete, prompt, server
from tests.support.servers import free_port

LEASE_S: Final = 6
# Of an answer that has not come, it is said that it never will.
HANG_S: Final = 60.0
SETTLES_WITHIN_S: Final = LEASE_S + 20.0
TOGETHER: Final = 12
TOKENS: Final = 8
BLOCKS: Final = 640
"""Of 32 tokens, in each engine: few, so that they are soon used again."""

LENGTHS: Final = (40, 130, 300, 520, 700)
_PROMPTS: Final = 30
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
    # Its `kv-transfer-config`, given the host and where it listens.
    config: Callable[[Host, str], dict[str, Any]]
    unknown: Forge  # makes a reference to what was never there
    out_of_range: Forge  # makes one whose numbers mean nothing
    environment: Mapping[str, str] = field(default_factory=dict)  # of its engines


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)  # how many of each
    slowest_s: float = 0.0  # the longest that one took
    crashes: int = 0  # engines that ended, or had to be, without being killed
    leaked: int = 0  # blocks that were in use when nobody used them


class Arena:
    """Two engines of a contender that are asked, and harmed."""

    def __init__(
        self,
        contender: Contender,
        hosts: tuple[Host, Host],
        engines: tuple[Engine, Engine],
    ) -> None:
        self.contender = contender
        self.prefill, self.decode = engines
        self.tally = Tally()  # where outcomes are counted
        self._hosts = hosts
        key = hosts[0].trust["psk_file"]
        self.signer = References([read_key_file(key)])
        # One for all: making one takes 40 ms.
        self._client = httpx.Client(
            timeout=HANG_S,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        )
        self._known: list[Reference] = []
        self._leaked = (0, 0)
        self._lock = threading.Lock()
        self.killing = False  # decode is killed, so that errors are no connector's
        self._decode_is_up = threading.Event()
        self._decode_is_up.set()

    # --- what is asked ------------------------------------------------------------

    def learn(self) -> None:
        """Have one engine alone say what is right."""
        for number in range(_PROMPTS):
            ids = prompt(LENGTHS[number % len(LENGTHS)], seed=number)
            said = self._post(self.prefill, ids, None, logprobs=2, **_NAMED)
            self._known.append(Reference.of(ids, said))

    def known(self, number: int) -> Reference:
        return self._known[number % len(self._known)]

    def alone(self, number: int) -> None:
        """Have prefill compute and answer a prompt."""
        self._post(self.prefill, self.known(number).ids, None)

    def prefilled(self, known: Reference) -> Params | None:
        """Have a prompt computed; what decode is told, or None without an engine."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        try:
            said = self._post(self.prefill, known.ids, asked, 1)
        except httpx.HTTPError:
            return None
        params: Params | None = said["kv_transfer_params"]
        return params

    def decoded(
        self, known: Reference, params: Params | None, patience_s: float = HANG_S
    ) -> None:
        """Have a prompt answered, note what came of it."""
        began = time.monotonic()
        try:
            said = self._post(self.decode, known.ids, params, timeout=patience_s)
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
        known = self.known(number)
        params = self.prefilled(known)
        self._decode_is_up.wait()
        self.decoded(known, params)

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

    def _post(
        self,
        engine: Engine,
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
    def stopped(self, engine: Engine) -> Iterator[None]:
        """Stop an engine's processes; they go on at the end of the block."""
        assert engine.running is not None
        os.killpg(engine.running.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(engine.running.pid, signal.SIGCONT)

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
        self._rate(_SLOW)
        try:
            yield
        finally:
            self._rate(_NORMAL)

    def settle(self) -> None:
        """See what is left behind, and have both engines well again."""
        engines = (self.prefill, self.decode)
        dead = [engine for engine in engines if not self._well(engine)]
        for engine in dead:
            self.tally.crashes += 1
            self.restart(engine)
        if dead:
            self._leaked = (0, 0)
        end = time.monotonic() + SETTLES_WITHIN_S
        while not all(map(_idle, engines)) and time.monotonic() < end:
            threading.Event().wait(0.2)
        leaked = (_used(self.prefill), _used(self.decode))
        self.tally.leaked += max(0, sum(leaked) - sum(self._leaked))
        self._leaked = leaked

    def _well(self, engine: Engine) -> bool:
        assert engine.running is not None
        if engine.running.poll() is not None:
            return False
        try:
            said = self._post(engine, self.known(0).ids, None)
        except httpx.HTTPError:
            return False
        return judged(self.known(0), said) is not Outcome.WRONG

    def _neighbour(self, way: int, verb: str, *more: str) -> None:
        there = self._hosts[1 - way].kv
        words = ("ip", "neighbour", verb, there, *more[:2], "dev", "wire")
        if more:
            words += ("nud", more[2])
        subprocess.run([*self._hosts[way].prefix, *words], check=True)

    def _rate(self, rate: str) -> None:
        for host in self._hosts:
            words = ("tc", "qdisc", "replace", "dev", "wire", "root", "tbf", "rate")
            limits = ("burst", "256k", "limit", "8mb")
            subprocess.run([*host.prefix, *words, rate, *limits], check=True)


@contextmanager
def arena(contender: Contender, kind: str) -> Iterator[Arena]:
    """Two engines of a model that serve, until the end of the block."""
    with ExitStack() as stack:
        folder = _folder(contender, kind)
        model = make_model(kind, folder)
        hosts = stack.enter_context(two_hosts(_NORMAL, folder))
        engines = tuple(
            _engine(contender, model, folder, name, host)
            for name, host in zip(("prefill", "decode"), hosts, strict=True)
        )
        stack.enter_context(running(*engines))
        made = Arena(contender, hosts, (engines[0], engines[1]))
        made.learn()
        yield made


def _folder(contender: Contender, kind: str) -> Path:
    path = Path("build", "faults", f"{contender.name}-{kind}").resolve()
    path.mkdir(parents=True, exist_ok=True)
    (path / "key").unlink(missing_ok=True)
    return path


def _engine(
    contender: Contender, model: Path, folder: Path, name: str, host: Host
) -> Engine:
    port, kv = free_port(), free_port()
    log = folder / f"{name}.log"
    log.unlink(missing_ok=True)
    environment = {
        # One process and one thread: two engines and more share two cores.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        **host.engine_environment(kv),
        **contender.environment,
    }
    made = server(
        model,
        log,
        f"http://{host.http}:{port}",
        contender.config(host, f"{host.kv}:{kv}"),
        *("--max-model-len", "1024", "--dtype", "float32", "--block-size", "32"),
        *("--num-gpu-blocks-override", str(BLOCKS), "--no-enable-prefix-caching"),
        *("--logprobs-mode", "raw_logits", "--distributed-executor-backend", "uni"),
        "--disable-uvicorn-access-log",
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


def _used(engine: Engine) -> int:
    try:
        return round(engine.metric("vllm:kv_cache_usage_perc") * BLOCKS)
    except httpx.HTTPError:
        return 0
