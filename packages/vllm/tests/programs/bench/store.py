"""Seconds to a first token whose prompt an engine has computed before, by what kept it.

``python -m packages.vllm.tests.programs.bench.store`` starts real vLLM engines on a CPU
over memory, a disk, a store server, Redis, and vLLM's own connector to files, and asks
each for prompts that it has to compute, and again when only its store has them: on the
same engine, on another one, after that one's restart, and after the server was killed.
Every answer is compared with that of an engine without a store. Needs vLLM, which `make
test-vllm` installs; without redis-server its row is left out. A quarter of an hour.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from packages.vllm.tests.programs.bench.requests import CLIENT, completion, streamed
from packages.vllm.tests.support import serving
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import Engine, prompt
from packages.vllm.tests.support.store_server import StoreServer
from tests.support.servers import free_port, redis_server
from tests.support.waiting import eventually

LENGTHS: Final = (1000, 8000)
ANSWER_TOKENS: Final = 8
# Beside a pass of 2,048 tokens, what is asked for takes its turn.
_ARGUMENTS: Final = (
    *("--max-model-len", "8192", "--max-num-batched-tokens", "2048"),
    *("--dtype", "float32", "--distributed-executor-backend", "uni"),
)
_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}
# Every block of a disk or of Redis passes through memory. Prompts that are asked for in
# turn find little of themselves in this.
_LITTLE: Final = "memory:64MiB"
_COMPUTED: Final = "computed, without a store"


@dataclass(slots=True)
class Found:
    # Seconds to the first token, by what kept the prompt and its length.
    first_s: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    # Answers that differ from those of the engine without a store.
    wrong: int = 0

    def ask(self, row: str, engine: Engine, prompts: list[list[int]]) -> None:
        print(f"{row} ...", flush=True)
        for ids in prompts:
            seconds, answer = _ask(engine, ids)
            times = self.first_s.setdefault(row, {})
            times.setdefault(len(ids), []).append(seconds)
            self.wrong += answer != self.answers.setdefault(tuple(ids), answer)
        # What it saves is in its store when nothing holds its blocks any more.
        assert eventually(lambda: engine.idle), engine.tail()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length")
    parser.add_argument("--json", type=Path, help="where every sample goes")
    parser.add_argument("--only", default=",".join(_MEASURES), help="of these")
    options = parser.parse_args()
    seeds = range(1, options.rounds + 1)
    prompts = [prompt(length, seed) for length in LENGTHS for seed in seeds]
    found, load = Found(), os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="kvwire-bench-") as made:
        folder = Path(made)
        start = _Starter(folder, make_model("wide", folder))
        _alone(start, found, prompts)
        for name, measure in _MEASURES.items():
            if name in options.only.split(","):
                measure(start, found, prompts)
    _print(found, load)
    if options.json:
        text = {"load": load, "first_s": found.first_s, "wrong": found.wrong}
        options.json.write_text(json.dumps(text))
    return int(found.wrong > 0)


class _Starter:
    """Makes engines of one model, each with a log of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self._model = folder, model
        self._numbers = itertools.count()

    def __call__(self, transfer: dict[str, Any] | None) -> Engine:
        number = next(self._numbers)
        core = str(number % (os.cpu_count() or 1))
        return serving.server(
            self._model,
            self.folder / f"engine-{number}.log",
            f"http://127.0.0.1:{free_port()}",
            transfer,
            *_ARGUMENTS,
            **_ENVIRONMENT,
            VLLM_CPU_OMP_THREADS_BIND=core,
        )

    def on(self, *tiers: str) -> Engine:
        extra = {"tiers": tiers, "lookup_timeout_s": 60.0}
        return self(
            {
                "kv_connector": "KvwireStoreConnector",
                "kv_connector_module_path": "kvwire_vllm.store.connector",
                "kv_connector_extra_config": extra,
            }
        )


# --- what is measured -----------------------------------------------------------------


def _alone(start: _Starter, found: Found, prompts: list[list[int]]) -> None:
    with running(engine := start(None)):
        _warm_up(engine)
        found.ask(_COMPUTED, engine, prompts)
        found.ask("vLLM's own prefix cache, the same engine", engine, prompts)


def _on_a_server(start: _Starter, found: Found, prompts: list[list[int]]) -> None:
    """Also from memory of the engine, which is asked first."""
    server = StoreServer(start.folder, memory="2GiB", disk="8GiB")
    first, second = (
        start.on("memory:1GiB", f"kvwire://{server.address}"),
        start.on(f"kvwire://{server.address}"),
    )
    try:
        with running(first, second):
            _warm_up(first, second)
            found.ask("computed, and saved to memory and a server", first, prompts)
            _forget(first)
            found.ask("memory of the engine", first, prompts)
            found.ask("store server, from another engine", second, prompts)
            second.kill()
            second.start()
            second.wait()
            _warm_up(second)
            found.ask("store server, after the engine's restart", second, prompts)
            server.restart()
            _forget(second)
            found.ask("store server, after its kill -9: its disk", second, prompts)
    finally:
        server.kill()


def _on_a_disk(start: _Starter, found: Found, prompts: list[list[int]]) -> None:
    engine = start.on(_LITTLE, f"disk:{start.folder / 'disk'}?size=8GiB")
    _twice(found, engine, prompts, "disk")


def _on_redis(start: _Starter, found: Found, prompts: list[list[int]]) -> None:
    if shutil.which("redis-server") is None:
        print("redis-server is not installed: its rows are left out")
        return
    with redis_server() as server:
        engine = start.on(_LITTLE, f"redis://127.0.0.1:{server.port}")
        _twice(found, engine, prompts, "Redis, by kvwire")


def _twice(found: Found, engine: Engine, prompts: list[list[int]], what: str) -> None:
    with running(engine):
        _warm_up(engine)
        found.ask(f"computed, and saved: {what}", engine, prompts)
        _forget(engine)
        found.ask(what, engine, prompts)


_MEASURES: Final = {
    "server": _on_a_server,
    "disk": _on_a_disk,
    "redis": _on_redis,
}


# --- how ------------------------------------------------------------------------------


def _warm_up(*engines: Engine) -> None:
    """The first long prompt touches every page of the cache."""
    for engine in engines:
        for seed in (1001, 1002):
            _ask(engine, prompt(max(LENGTHS), seed))
        _forget(engine)


def _forget(engine: Engine) -> None:
    """Have vLLM forget what is in its own cache."""
    assert eventually(lambda: engine.idle), engine.tail()
    CLIENT.post(f"{engine.url}/reset_prefix_cache").raise_for_status()


def _ask(engine: Engine, ids: list[int]) -> tuple[float, list[int]]:
    began = time.perf_counter()
    parts = streamed(engine, completion(ids, ANSWER_TOKENS))
    choices = (one for _, part in parts for one in json.loads(part)["choices"])
    return parts[0][0] - began, [id for one in choices for id in one["token_ids"]]


def _print(found: Found, load: tuple[float, float, float]) -> None:
    base = found.first_s[_COMPUTED]
    print(
        "\n| the prompt's KV is |" + "|".join(f" {n:,} tokens " for n in LENGTHS) + "|"
    )
    print("|---|" + "---|" * len(LENGTHS))
    for row, times in found.first_s.items():
        cells = "|".join(_cell(times[n], base[n]) for n in LENGTHS)
        print(f"| {row} |{cells}|")
    print(
        f"\n{found.wrong} wrong answers; load {load[0]:.1f} to {os.getloadavg()[0]:.1f}"
    )


def _cell(times: list[float], base: list[float]) -> str:
    middle = statistics.median(times)
    return f" {middle * 1000:,.0f} ms, {statistics.median(base) / middle:.1f}x "


if __name__ == "__main__":
    sys.exit(main())
