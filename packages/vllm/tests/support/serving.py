"""vLLM servers and the proxy, as processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import free_port
from tests.support.waiting import eventually

NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vllm is not installed here; `make test-vllm` installs it",
)
# vLLM takes half a minute to start on two idle cores.
STARTS_WITHIN_S = 300.0
# What a request of these models takes at most on a busy machine.
ANSWERS_WITHIN_S = 120.0


@dataclass
class Process:
    """A server as a process group of its own."""

    command: list[str]  # how it is started
    log: Path  # where its output goes
    url: str  # where it serves
    environment: dict[str, str] = field(default_factory=dict)  # beside our own
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        assert self.running is not None
        end = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < end:
            if self.running.poll() is not None:
                raise RuntimeError(f"it ended:\n{self.tail()}")
            try:
                httpx.get(f"{self.url}/health", timeout=5).raise_for_status()
            except httpx.HTTPError:
                threading.Event().wait(0.2)
            else:
                return
        raise TimeoutError(f"not up:\n{self.tail()}")

    def kill(self) -> None:
        """End it and all it has started, at once."""
        self.signal(signal.SIGKILL)
        if self.running is not None:
            self.running.wait()
            self.running = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and all it has started, without waiting."""
        if self.running is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(self.running.pid, number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop its processes; they go on at the end of the block."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def post(self, path: str, **asked: Any) -> Any:
        return httpx.post(f"{self.url}{path}", json=asked, timeout=ANSWERS_WITHIN_S)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@dataclass
class Engine(Process):
    kv: str = ""  # where each of its ranks listens for KV, with commas
    stages: int = 1  # of pipeline parallelism

    def generate(self, prompt: Sequence[int], tokens: int = 12, **more: Any) -> Any:
        return complete(self.url, prompt, tokens, **more)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=ANSWERS_WITHIN_S).text

    def metric(self, name: str) -> float:
        return metric_of(self.metrics(), name)

    @property
    def idle(self) -> bool:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(f"vllm:{name}") for name in names)


def engine(
    model: Path,
    folder: Path,
    name: str,
    core: int,
    transfer: dict[str, Any],
    *arguments: str,
    ranks: int = 1,
    stages: int = 1,
    beside: Sequence[dict[str, Any]] = (),
    policy: str = "recompute",
    alone: dict[str, Any] | None = None,
    own: bool = False,
) -> Engine:
    """An engine with KvwireConnector and those beside it, or with another one alone.

    With ``own`` it knows its own URL.
    """
    kv_port = free_port()
    workers = ranks * stages
    listen = [f"127.0.0.1:{kv_port + worker}" for worker in range(workers)]
    log, url = folder / f"{name}.log", f"http://127.0.0.1:{free_port()}"
    if own or "directory" in transfer:
        transfer = {"http": url, **transfer}
    config = alone or kvwire_config(listen[0], transfer)
    if beside:
        children = {"connectors": [config, *beside]}
        config = {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": children,
        }
    config["kv_load_failure_policy"] = policy
    said = [
        *("--max-model-len", "4352", "--max-num-batched-tokens", "1024"),
        # Other sums of another batch change no token in this type.
        *("--dtype", "float32", "--tensor-parallel-size", str(ranks)),
        *("--pipeline-parallel-size", str(stages)),
        *("--distributed-executor-backend", "uni" if workers == 1 else "mp"),
    ]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(
            str((core + worker) % (os.cpu_count() or 1)) for worker in range(workers)
        ),
        "KVWIRE_PREFER": "",
    }
    if workers == 1:
        # A worker in a process of its own takes as long to start as the engine.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if stages > 1:
        # On CPUs only the warm-up of what is compiled makes room for another stage's
        # numbers (`sync_and_gather_intermediate_tensors`).
        compiled = {"mode": 2, "backend": "eager"}
        said += ["--no-enforce-eager", "--compilation-config", json.dumps(compiled)]
    made = server(model, log, url, config, *said, *arguments, **environment)
    made.kv, made.stages = ",".join(listen), stages
    return made


def kvwire_config(listen: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "KvwireConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"listen": listen, **extra},
    }


def server(
    model: Path,
    log: Path,
    url: str,
    transfer: Mapping[str, Any] | None,
    *arguments: str,
    prefix: Sequence[str] = (),
    **environment: str,
) -> Engine:
    """A server of a model with this ``kv-transfer-config``, not started."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    command = [
        *(*prefix, sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "m"),
        *("--host", host, "--port", port, "--enforce-eager", *arguments),
    ]
    if transfer is not None:
        said = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **transfer}
        command += ["--kv-transfer-config", json.dumps(said)]
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return Engine(command, log, url, environment | {"HF_HUB_OFFLINE": "1"})


def metric_of(text: str, name: str, label: str = "") -> float:
    """The sum of a metric over its labels, or of those with one."""
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)


@dataclass
class Front(Process):
    named: int = 0  # engines that its command names

    def wait(self) -> None:
        """Wait for each engine it names: one alone would answer without a transfer."""
        super().wait()
        assert eventually(lambda: len(self.engines("up")) >= self.named)

    def engines(self, gauge: str) -> set[str]:
        """URLs of the engines of which a gauge is not 0, by the proxy's metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWERS_WITHIN_S).text
        lines = [line for line in text.splitlines() if f"_engine_{gauge}{{" in line]
        return {line.split('"')[1] for line in lines if not line.endswith(" 0.0")}


def front(folder: Path, *arguments: str) -> Front:
    port = free_port()
    command = [sys.executable, "-m", "kvwire_vllm.proxy"]
    command += ["--port", str(port), *arguments]
    url = f"http://127.0.0.1:{port}"
    named = sum(one.startswith(("--prefill", "--decode")) for one in arguments)
    return Front(command, folder / "proxy.log", url, named=named)


def before(
    engines: Sequence[Engine], roles: Sequence[str] = ("prefill", "decode")
) -> list[str]:
    """How a proxy is called that is to serve before these engines."""
    return [
        f"--{role}={one.url}={one.kv},stages={one.stages}"
        for role, one in zip(roles, engines, strict=True)
    ]


def asked(tokens: int, **more: Any) -> dict[str, Any]:
    """What a request for so many tokens says, whatever comes out."""
    usual = {"model": "m", "temperature": 0, "ignore_eos": True}
    return {**usual, "max_tokens": tokens, "return_token_ids": True, **more}


def complete(url: str, prompt: Sequence[int], tokens: int = 12, **more: Any) -> Any:
    """A completion; the whole answer. ``client`` and ``timeout`` are httpx's."""
    body = asked(tokens, prompt=list(prompt), **more)
    timeout = body.pop("timeout", ANSWERS_WITHIN_S)
    client = body.pop("client", httpx)
    said = client.post(f"{url}/v1/completions", json=body, timeout=timeout)
    said.raise_for_status()
    return said.json()


def tokens_of(answer: Any) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def streamed(url: str, prompt: Sequence[int], tokens: int = 12, **more: Any) -> Any:
    """The token ids of a completion that is streamed."""
    body = asked(tokens, prompt=list(prompt), stream=True, **more)
    made: list[int] = []
    path = f"{url}/v1/completions"
    with httpx.stream("POST", path, json=body, timeout=ANSWERS_WITHIN_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            event = line.removeprefix("data: ")
            if event and event != "[DONE]":
                made += json.loads(event)["choices"][0]["token_ids"]
    return made


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that no other seed begins with."""
    chance = random.Random(seed * 10_007 + tokens)
    return [chance.randrange(5, 500) for _ in range(tokens)]
