"""From the end of prefill to decode's first token: kvwire beside vLLM's own connectors.

``python -m tests.bench.vllm_handover`` starts a prefill and a decode server of vLLM for
each connector and asks them in turns, so that a busy moment of the machine hits all of
them. Needs vLLM, and nixl for NixlConnector; `make test-vllm` makes the environment.
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.integrations.vllm.serving import Engine, free_port, prompt

# 64 KiB of KV a token, and little else to compute.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "64KiB": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
DECODE_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Contender:
    """A connector, and how its two engines are asked.

    Attributes:
        name: In the table.
        servers: Contenders with the same servers share them.
        connector: The ``kv-transfer-config`` of a side, given its KV port.
        environment: Of its servers.
        at_once: Both engines are asked together.
    """

    name: str
    servers: str
    connector: Callable[[str, int], dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)
    at_once: bool = False


@dataclass(slots=True)
class Sample:
    """One request.

    Attributes:
        prefill_s: Until prefill had answered.
        handover_s: From there to decode's first token.
        step_s: Of decode, the median of the tokens that followed.
    """

    prefill_s: float
    handover_s: float
    step_s: float


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="64KiB")
    parser.add_argument("--lengths", default="300x10,1500x6,4000x3")
    parser.add_argument("--concurrent", default="300x8,1500x8")
    parser.add_argument("--only", help="contenders, by a part of their names")
    parser.add_argument("--json", type=Path, help="where every sample goes")
    options = parser.parse_args()
    chosen = [
        c
        for c in CONTENDERS
        if not options.only or any(o in c.name for o in options.only.split(","))
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = _model(folder, options.shape)
        pairs = {
            c.servers: (
                _server(c, "kv_producer", 0, model, folder),
                _server(c, "kv_consumer", 1, model, folder),
            )
            for c in reversed(chosen)
        }
        alone = _server(None, "", 0, model, folder)
        servers = [alone, *(server for pair in pairs.values() for server in pair)]
        pairs["off"] = (alone, alone)
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait()
            samples = _measure(chosen, pairs, options)
        finally:
            for server in servers:
                server.kill()
    _print(chosen, samples)
    return 0


def _measure(
    chosen: Sequence[Contender],
    pairs: dict[str, tuple[Engine, Engine]],
    options: argparse.Namespace,
) -> dict[str, dict[str, list[Sample]]]:
    """Samples by contender and by ``length x concurrency``, in turns."""
    found: dict[str, dict[str, list[Sample]]] = {c.name: {} for c in chosen}
    found["off"] = {}
    seed = 0
    for contender in chosen:  # the first request of a pair makes its connections
        for length in (50, 400):
            _request(
                contender, pairs[contender.servers], prompt(length, seed := seed + 1)
            )
    for length, repeats in _counts(options.lengths):
        for _ in range(repeats):
            for contender in chosen:
                seed += 1
                sample = _request(
                    contender, pairs[contender.servers], prompt(length, seed)
                )
                found[contender.name].setdefault(f"{length}x1", []).append(sample)
            seed += 1
            alone = _prefill(pairs["off"][0], prompt(length, seed), None)[0]
            found["off"].setdefault(f"{length}x1", []).append(Sample(alone, 0.0, 0.0))
            _save(found, options.json)
    for length, together in _counts(options.concurrent):
        for contender in chosen:
            prompts = [prompt(length, seed := seed + 1) for _ in range(together)]
            pair = pairs[contender.servers]
            with ThreadPoolExecutor(together) as pool:
                batch = pool.map(
                    lambda ids, c=contender, p=pair: _request(c, p, ids), prompts
                )
                found[contender.name][f"{length}x{together}"] = list(batch)
            _save(found, options.json)
    return found


def _request(
    contender: Contender, pair: tuple[Engine, Engine], ids: list[int]
) -> Sample:
    """One request through both engines."""
    prefill, decode = pair
    asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if not contender.at_once:
        seconds, params, ended = _prefill(prefill, ids, asked)
        tokens = _decode(decode, ids, params)
        return _sample(seconds, ended, tokens)
    name = os.urandom(8).hex()
    with ThreadPoolExecutor(1) as pool:
        fetched = {
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote": [prefill.kv],
        }
        waiting = pool.submit(_decode, decode, ids, fetched)
        seconds, _, ended = _prefill(prefill, ids, asked | {"transfer_id": name})
        return _sample(seconds, ended, waiting.result())


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
    said = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=None)
    ended = time.perf_counter()
    said.raise_for_status()
    return ended - began, said.json().get("kv_transfer_params"), ended


def _decode(engine: Engine, ids: list[int], params: Any) -> list[float]:
    """When each token came."""
    body = _body(ids, DECODE_STEPS, params) | {"stream": True}
    with httpx.stream(
        "POST", f"{engine.url}/v1/completions", json=body, timeout=None
    ) as said:
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


def _model(folder: Path, shape: str) -> Path:
    path = folder / "model"
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[shape],
    }
    (path / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(512)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    return path


def _server(
    contender: Contender | None, role: str, core: int, model: Path, folder: Path
) -> Engine:
    port, kv = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "m", "--port", str(port)),
        *("--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "4352"),
        *("--dtype", "bfloat16", "--load-format", "dummy"),
        "--no-enable-prefix-caching",
    ]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    name = "off"
    if contender is not None:
        name = f"{contender.servers}-{role}"
        transfer = {"kv_role": role, **contender.connector(role, kv)}
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment |= contender.environment
    log = folder / f"{name}.log"
    url = f"http://127.0.0.1:{port}"
    return Engine(command, log, url, environment, kv=f"127.0.0.1:{kv}")


def _kvwire(**more: Any) -> Callable[[str, int], dict[str, Any]]:
    def connector(role: str, port: int) -> dict[str, Any]:
        return {
            "kv_connector": "KvwireConnector",
            "kv_connector_module_path": "kvwire.integrations.vllm",
            "kv_connector_extra_config": {"listen": f"127.0.0.1:{port}", **more},
        }

    return connector


def _nixl(role: str, port: int) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}


_FILES: Final = tempfile.gettempdir() + f"/kvwire-handover-{os.getpid()}"


def _files(role: str, port: int) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": _FILES},
    }


CONTENDERS: Final = (
    Contender("kvwire tcp, at once", "tcp", _kvwire(require=["tcp"]), at_once=True),
    Contender("kvwire tcp, in sequence", "tcp", _kvwire(require=["tcp"])),
    Contender("kvwire local, in sequence", "local", _kvwire(require=["local"])),
    Contender("NixlConnector tcp", "nixl-tcp", _nixl, {"UCX_TLS": "tcp"}),
    Contender("NixlConnector shm", "nixl-shm", _nixl, {"UCX_TLS": "sm,self,tcp"}),
    Contender("files (ExampleConnector)", "files", _files),
)


def _counts(text: str) -> list[tuple[int, int]]:
    """Read ``300x10,1500x6``."""
    pairs = (part.split("x") for part in text.split(",") if part)
    return [(int(length), int(count)) for length, count in pairs]


def _print(
    chosen: Sequence[Contender], samples: dict[str, dict[str, list[Sample]]]
) -> None:
    columns = list(samples[chosen[0].name])
    print("handover in ms, p50 / p99")
    print("| |" + "|".join(f" {column} " for column in columns) + "|")
    print("|---|" + "---|" * len(columns))
    for contender in chosen:
        cells = [_cell(samples[contender.name][c], "handover_s") for c in columns]
        print(f"| {contender.name} | " + " | ".join(cells) + " |")
    print("\nprefill in ms, p50 / p99; one decode step")
    for name in [*(c.name for c in chosen), "off"]:
        cells = [_cell(samples[name][c], "prefill_s") for c in samples[name]]
        every = [s.step_s for part in samples[name].values() for s in part]
        known = [seconds for seconds in every if seconds > 0]
        step = statistics.median(known) * 1000 if known else math.nan
        print(f"| {name} | " + " | ".join(cells) + f" | {step:.1f} |")


def _cell(samples: list[Sample], what: str) -> str:
    values = sorted(getattr(sample, what) * 1000 for sample in samples)
    p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
    return f"{statistics.median(values):.0f} / {p99:.0f}"


def _save(found: dict[str, dict[str, list[Sample]]], path: Path | None) -> None:
    """Keep what there is so far: a run takes long, and may be cut short."""
    if path:
        path.write_text(json.dumps(found, default=_plain))


def _plain(sample: Sample) -> list[float]:
    return [sample.prefill_s, sample.handover_s, sample.step_s]


if __name__ == "__main__":
    sys.exit(main())
