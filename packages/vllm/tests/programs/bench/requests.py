"""Requests of the handover benchmark to vLLM servers, and how long they took."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import httpx

from packages.vllm.tests.support.serving import Engine, asked

DECODE_STEPS: Final = 8
# One for all: making one takes 40 ms, which belong to no connector. vLLM closes what is
# idle for 5 s.
CLIENT: Final = httpx.Client(
    timeout=None, limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0)
)


@dataclass(frozen=True, slots=True)
class Sample:
    # Until prefill had answered.
    prefill_s: float
    # From there to decode's first token.
    handover_s: float = math.nan
    # Of decode, the median of the tokens that followed.
    step_s: float = math.nan


def ask_alone(engine: Engine, ids: list[int]) -> Sample:
    return Sample(_prefill(engine, ids, None)[0])


def ask_in_sequence(prefill: Engine, decode: Engine, ids: list[int]) -> Sample:
    """Ask decode when prefill has answered, with what it has said."""
    seconds, params, ended = _prefill(prefill, ids, _sends())
    return _sample(seconds, ended, _decode(decode, ids, params))


def ask_at_once(prefill: Engine, decode: Engine, ids: list[int]) -> Sample:
    """Ask both together."""
    name = os.urandom(8).hex()
    sends = _sends() | {"transfer_id": name}
    loads = {"do_remote_prefill": True, "transfer_id": name, "remote": [prefill.kv]}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_decode, decode, ids, loads)
        seconds, _, ended = _prefill(prefill, ids, sends)
        return _sample(seconds, ended, waiting.result())


def _sends() -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False}


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
    body = completion(ids, 1, params)
    said = CLIENT.post(f"{engine.url}/v1/completions", json=body)
    ended = time.perf_counter()
    said.raise_for_status()
    return ended - began, said.json().get("kv_transfer_params"), ended


def _decode(engine: Engine, ids: list[int], params: Any) -> list[float]:
    """Ask for tokens as they are made: when each part came."""
    body = completion(ids, DECODE_STEPS, params) | {"stream": True}
    with CLIENT.stream("POST", f"{engine.url}/v1/completions", json=body) as said:
        said.raise_for_status()
        lines = (line for line in said.iter_lines() if line.startswith("data: {"))
        return [time.perf_counter() for _ in lines]


def completion(ids: list[int], tokens: int, params: Any = None) -> dict[str, Any]:
    more = {"kv_transfer_params": params} if params else {}
    return asked(tokens, prompt=ids, **more)
