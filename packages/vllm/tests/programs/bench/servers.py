"""The servers that `handover` compares and asks."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvwire.limits import KIB
from packages.vllm.tests.programs.bench.requests import (
    Sample,
    ask_alone,
    ask_at_once,
    ask_in_sequence,
)
from packages.vllm.tests.support import serving
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import running as serving_all
from packages.vllm.tests.support.serving import Engine
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
_TOKEN_BYTES: Final = 64 * KIB
# Tokens of one forward pass: 4,000 are computed in two.
CHUNK_TOKENS: Final = 2048
# Of one request.
MOST_TOKENS: Final = 4352
# vLLM's own on CPUs, and the memory that `serving.server` gives a cache.
_BLOCK_TOKENS: Final = 128
_CACHE_BYTES: Final = 2**30
Connector = Callable[[str, str], dict[str, Any]]


# On CPUs vLLM puts a worker into a process beside its engine's unless it is told this,
# and each waits actively for the other: on two cores, for what another engine computes.
# On GPUs one rank is one process by itself. OpenMP cannot be told how to bind then, so
# that the processes are bound.
_ONE_PROCESS: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_ONE_RANK: Final = ("--distributed-executor-backend", "uni")


@dataclass(frozen=True, slots=True)
class Contender:
    """A connector, and how its two engines are asked."""

    # In the table.
    name: str
    # Contenders with the same servers share them.
    servers: str
    # The ``kv-transfer-config`` of a side, given its role and where it listens for KV.
    connector: Connector
    # Of its servers.
    environment: dict[str, str] = field(default_factory=dict)
    # Both engines are asked together.
    at_once: bool = False
    # Its threads wait actively, and take their turn on the cores of other engines.
    spins: bool = False


def cache_tokens(together: int) -> int:
    """Tokens of an engine's cache, if requests have so many together.

    No more than that, so that few warm-ups write to all of it.
    """
    largest = _CACHE_BYTES // _TOKEN_BYTES
    return min(largest, max(MOST_TOKENS + _BLOCK_TOKENS, 2 * together))


def server(
    contender: Contender | None,
    role: str,
    core: int,
    model: Path,
    folder: Path,
    tokens: int,
) -> Engine:
    """An engine, not started, with a cache of so many tokens."""
    port, kv = free_port(), free_port()
    bound = ("taskset", "-c", str(_core(core)))
    environment = _ONE_PROCESS | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv)}
    name, transfer = "off", None
    if contender is not None:
        name = f"{contender.servers}-{role}"
        connector = contender.connector(role, f"127.0.0.1:{kv}")
        # What fails is an error, as vLLM has it by default.
        transfer = {**connector, "kv_role": role, "kv_load_failure_policy": "fail"}
        environment |= contender.environment
    made = serving.server(
        model,
        folder / f"{model.name}-{name}.log",
        f"http://127.0.0.1:{port}",
        transfer,
        *("--max-model-len", str(MOST_TOKENS)),
        *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
        *("--dtype", "bfloat16", "--load-format", "dummy"),
        *("--no-enable-prefix-caching", *_ONE_RANK),
        *("--num-gpu-blocks-override", str(tokens // _BLOCK_TOKENS)),
        prefix=bound,
        **environment,
    )
    made.kv = f"127.0.0.1:{kv}"
    return made


def _kvwire(**more: Any) -> Connector:
    return lambda role, listen: serving.kvwire_config(listen, more)


def _nixl(role: str, listen: str) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}


_TCP: Final = _kvwire(require=["tcp"])
_LOCAL: Final = _kvwire(require=["local"])
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


# --- while they run -------------------------------------------------------------------

# And beside which servers, whose threads take their share of the cores.
OFF: Final = "no connector, beside "
# The first request of a pair connects it.
FIRST_TOKENS: Final = 50


@dataclass(frozen=True, slots=True)
class Turn:
    """Somebody who is asked in turns with others."""

    # Of the contender, or ``no connector, beside ...``.
    name: str
    # Sends it a prompt, and waits.
    ask: Callable[[list[int]], Sample]
    # Those that take part: prefill and decode, or one alone.
    engines: tuple[Engine, ...]
    # They wait actively when nobody asks them.
    spins: bool = False


def chosen(only: Sequence[str] | None) -> list[list[Contender]]:
    """The groups, of contenders whose names have one of these parts; all for None."""
    groups = [
        [one for one in group if any(part in one.name for part in only or [""])]
        for group in GROUPS
    ]
    return [group for group in groups if group]


@contextmanager
def running(group: Sequence[Contender], tokens: int) -> Iterator[list[Turn]]:
    """Run a group's servers, and one without a connector, until the block ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model("gqa", folder, **SHAPE)
        make = partial(server, model=model, folder=folder, tokens=tokens)
        alone = make(None, "", 0)
        pairs = {
            one.servers: (
                make(one, "kv_producer", 0),
                make(one, "kv_consumer", 1),
            )
            for one in group
        }
        engines = [alone, *itertools.chain.from_iterable(pairs.values())]
        stack.enter_context(serving_all(*engines))
        # NixlConnector moves the thread of the forward pass to the machine's last
        # core, which is the same one for both engines.
        moved = [pairs[one.servers] for one in group if one.spins]
        for core, engine in itertools.chain(*map(enumerate, moved)):
            engine.bind(_core(core))
        turns = [
            Turn(
                one.name, _ask(one, *pairs[one.servers]), pairs[one.servers], one.spins
            )
            for one in group
        ]
        off = OFF + group[0].servers
        yield [*turns, Turn(off, partial(ask_alone, alone), (alone,))]


def _core(core: int) -> int:
    """The core of an engine; several engines share one where there are few."""
    return core % (os.cpu_count() or 1)


def _ask(
    contender: Contender, prefill: Engine, decode: Engine
) -> Callable[[list[int]], Sample]:
    if contender.at_once:
        return partial(ask_at_once, prefill, decode)
    return partial(ask_in_sequence, prefill, decode)
