"""What it costs decoding that blocks are saved as they fill."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from kvwire_vllm.store.config import StoreSettings
from kvwire_vllm.store.lookup import Lookup
from kvwire_vllm.store.scheduler import StoreScheduler
from kvwire_vllm.store.worker import StoreWorker
from packages.vllm.tests.programs.failover.arena import (
    BLOCK_TOKENS,
    Workload,
    connector,
)
from packages.vllm.tests.store.test_scheduler import Request
from packages.vllm.tests.support.fakes import (
    DIM,
    HEADS,
    LAYERS,
    NAMES,
    SHAPE,
    Cached,
    New,
    Output,
)
from packages.vllm.tests.support.nursery import Nursery
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import Engine, engine
from packages.vllm.tests.support.store_server import StoreServer

_TICKS_PER_S: Final = 100.0  # Linux counts a process's time in these


@dataclass(slots=True)
class Rates:
    """One engine's turns."""

    tokens_per_s: list[float] = field(default_factory=list)
    cpu_s_per_token: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Cost:
    """Engines that decode the same in turns, one of them over a store server.

    Each turn is compared with the other engine's next to it, since other programs' load
    changes from one second to the next.
    """

    streams: int
    saving: Rates = field(default_factory=Rates)
    alone: Rates = field(default_factory=Rates)
    # With a connector that does nothing.
    bare: Rates = field(default_factory=Rates)

    @property
    def rate(self) -> float:
        """How fast the one that saves decodes, as a part of the rate without."""
        return _ratio(self.saving.tokens_per_s, self.alone.tokens_per_s)

    @property
    def rate_to_bare(self) -> float:
        """The same, as a part of the rate with a connector that does nothing."""
        return _ratio(self.saving.tokens_per_s, self.bare.tokens_per_s)

    @property
    def step_s(self) -> float:
        """How long a step of the engine without a connector takes."""
        return self.streams / statistics.median(self.alone.tokens_per_s)

    @property
    def more_s(self) -> float:
        """How much longer a step of the engine that saves takes."""
        return self.step_s * (1 / self.rate - 1)

    @property
    def best(self) -> float:
        """The same of the fastest turn of each."""
        return max(self.saving.tokens_per_s) / max(self.alone.tokens_per_s)

    @property
    def work(self) -> float:
        """The processor's time for a token, likewise; other programs change it less."""
        return _ratio(self.saving.cpu_s_per_token, self.alone.cpu_s_per_token)


# Of a stream in a turn: they fill three blocks, and take a second.
_TURN_TOKENS: Final = 400


_BARE: Final = {
    "kv_connector": "BareConnector",
    "kv_connector_module_path": "packages.vllm.tests.support.bare_connector",
    "kv_role": "kv_both",
}


def cost_of(
    model: Path,
    folder: Path,
    *,
    rounds: int,
    streams: int,
    tokens: int = _TURN_TOKENS,
) -> Cost:
    """Measure it; the engines have the same core, and one works at a time."""
    found = Cost(streams)
    server = StoreServer(folder, memory="256MiB", disk="2GiB")
    store = connector(server.address)
    saving = engine(model, folder, "saving", 0, {}, alone=store)
    alone = engine(model, folder, "alone", 0, {}, alone={})
    at = alone.command.index("--kv-transfer-config")
    del alone.command[at : at + 2]
    bare = engine(model, folder, "bare", 0, {}, alone=_BARE)
    pairs = [(saving, found.saving), (alone, found.alone), (bare, found.bare)]
    engines = [one for one, _ in pairs]
    try:
        with Nursery() as nursery, running(*engines, starter=nursery.start):
            for number in range(rounds + 1):
                for one, rates in pairs if number % 2 else reversed(pairs):
                    began, cpu = time.monotonic(), _cpu_s(one)
                    Workload.of(streams, tokens, 1000 * number, one)
                    if number:  # the first one warms them up
                        seconds = time.monotonic() - began
                        rates.tokens_per_s.append(streams * tokens / seconds)
                        used = _cpu_s(one) - cpu
                        rates.cpu_s_per_token.append(used / (streams * tokens))
    finally:
        server.kill()
    return found


@dataclass(slots=True)
class Hooks:
    """What the connector's calls of a step take, without an engine around them."""

    engine_s: float  # of the engine's thread, a step
    process_s: float  # of the whole process, so with the store's thread
    blocks: int  # that were filled


def cost_of_hooks(folder: Path, *, streams: int, steps: int) -> Hooks:
    """Have streams decode one token a step as fast as the connector can follow."""
    server = StoreServer(folder, memory="256MiB", disk="2GiB")
    settings = StoreSettings(tiers=("memory:64MiB", f"kvwire://{server.address}"))
    shape = replace(SHAPE, block_tokens=BLOCK_TOKENS)
    worker = StoreWorker(settings, [shape], folder / "worker")
    count = streams * (1 + steps // BLOCK_TOKENS)
    sizes = (LAYERS, count, HEADS, BLOCK_TOKENS, 2 * DIM)
    worker.register(dict(zip(NAMES, np.zeros(sizes, np.float32), strict=True)))
    lookup = Lookup([folder / "worker"], 60.0)
    side = StoreScheduler(BLOCK_TOKENS, lookup.begin)

    def step(output: Output) -> float:
        began = time.thread_time()
        said = side.step(output)
        worker.fence(said)
        worker.begin_step(said)
        worker.start_loads()
        worker.step_written()
        side.reported(*worker.finished())
        worker.take_errors()
        worker.take_observed()
        return time.thread_time() - began

    free = iter(range(count))
    requests = [Request(f"r{number}", [number]) for number in range(streams)]
    names = [one.request_id for one in requests]
    new = [New(name, ([next(free)],)) for name in names]
    for one in requests:
        side.begun(one)
    try:
        step(Output(dict.fromkeys(names, 1), new))
        engine_s, began = 0.0, time.process_time()
        for at in range(1, steps):
            filled = at % BLOCK_TOKENS == 0
            added = [([next(free)],) if filled else None for _ in names]
            for one in requests:
                one._all_token_ids.append(at % 500)
            cached = Cached(names, [*added], [at] * streams)
            engine_s += step(
                Output(dict.fromkeys(names, 1), scheduled_cached_reqs=cached)
            )
        used = time.process_time() - began
    finally:
        lookup.close()
        worker.close()
        server.kill()
    blocks = streams * (steps // BLOCK_TOKENS)
    return Hooks(engine_s / steps, used / steps, blocks)


def _ratio(these: list[float], those: list[float]) -> float:
    pairs = zip(these, those, strict=True)
    return statistics.median(this / that for this, that in pairs)


def _cpu_s(one: Engine) -> float:
    """The processor's time that an engine's processes have had."""
    assert one.running is not None
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[2]) == one.running.pid:  # its process group
            total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return total
