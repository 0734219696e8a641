"""vLLM's own scheduler and block pool before a model of arithmetic.

The KV of a token is a number that depends on all tokens before it, and each step checks
what it reads: KV that is not there, or is another prompt's, fails the step. The worker
is small; its transfers are over when a test says so, with the blocks that it names.
"""

from __future__ import annotations

import contextlib
import queue
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, while it is imported
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from kvwire_vllm.connector import ArrivedPrompts
    from kvwire_vllm.metadata import LoadPrompt
    from packages.vllm.tests.support.own_http import Asked, OwnHTTP, serving

BLOCK_TOKENS = 128
_NOTHING = -1


def kv_of(tokens: list[int]) -> list[int]:
    """The KV of each token."""
    found, last = [], 7
    for token in tokens:
        last = (last * 1_000_003 + token) % 2_147_483_647
        found.append(last)
    return found


def next_token(tokens: list[int]) -> int:
    return 5 + kv_of(tokens)[-1] % 400


class Rig:
    """One engine without its model. With ``ahead`` it schedules before it has run."""

    def __init__(
        self,
        model: Path,
        server: OwnHTTP,
        *,
        blocks: int,
        ahead: bool,
        chunk: int,
        wait_s: float,
    ) -> None:
        extra = {"http": server.url, "fingerprint": "rig"}
        config = EngineArgs(
            model=str(model),
            max_model_len=4096,
            max_num_seqs=8,
            max_num_batched_tokens=chunk,
            enforce_eager=True,
            dtype="float32",
            async_scheduling=ahead,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvwireConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            ),
        ).create_engine_config()
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        config.cache_config.block_size = BLOCK_TOKENS
        config.cache_config.num_gpu_blocks = blocks
        groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._ahead = ahead
        self._server = server
        self.blocks = blocks
        self.scheduler: Any = (AsyncScheduler if ahead else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.scheduler.connector.holes.wait_s = wait_s
        self._cache = np.full((blocks, BLOCK_TOKENS), _NOTHING, np.int64)
        # Tokens and blocks of each request, as the worker knows it.
        self._running: dict[str, tuple[list[int], list[int]]] = {}
        self._scheduled: deque[Any] = deque()
        # The requests to the engine's own server that it has now, by their names.
        self.own: dict[str, Asked] = {}
        self._landed: set[str] = set()
        self._transfers: dict[str, LoadPrompt] = {}
        self._lost: dict[str, Collection[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.computed = 0  # tokens of prompts, in steps that ran
        self.asked = 0  # requests to its own server
        # Tokens of the next of these, in the place of what is asked.
        self.swap_next: list[int] | None = None

    # --- what a test does -------------------------------------------------------------

    def add(self, name: str, tokens: list[int], answer: int = 3, **params: Any) -> None:
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0)
        if params:
            sampling.extra_args = {"kv_transfer_params": params}
        self.answers[name] = []
        self.scheduler.add_request(
            Request(name, tokens, sampling, None, block_hasher=self._hasher)
        )

    def fetch(self, name: str, tokens: list[int]) -> None:
        """Add a request whose KV another engine has."""
        there: Any = {"transfer_id": name, "remote": ["127.0.0.1:1"]}
        self.add(name, tokens, do_remote_prefill=True, **there)

    def land(self, name: str, lost: Collection[int] = ()) -> None:
        """Let the transfer of a request be over, without some blocks of its prompt."""
        self._lost[name] = lost

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self) -> None:
        """Preempt what runs, as vLLM does before it resets its prefix cache."""
        with contextlib.suppress(RuntimeError):  # others wait for KV: no reset
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def hang_up(self) -> None:
        """Answer what was asked of the own server and is not known any more."""
        for name in self.own.keys() - self.scheduler.requests.keys():
            self.own.pop(name).done.set()

    def close_server(self) -> None:
        self._server.socket.close()

    def step(self) -> None:
        self._serve()
        self._scheduled.append(self.scheduler.schedule())
        if len(self._scheduled) > self._ahead:
            self._run(self._scheduled.popleft())

    def until(self, condition: Callable[[], bool], steps: int = 20_000) -> None:
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"it is not so after {steps} steps")

    @property
    def idle(self) -> bool:
        """Whether no request is left, and none of the blocks is in use."""
        if self.scheduler.requests or self.own or not self._server.asked.empty():
            return False
        pool = self.scheduler.kv_cache_manager.block_pool
        return bool(pool.get_num_free_blocks() == self.blocks - 1)

    def waiting_for_kv(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and (
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        )

    # --- inside -----------------------------------------------------------------------

    def _serve(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                asked = self._server.asked.get(timeout=0.001 if self._landed else 0)
                self.asked += 1
                name = f"own-{self.asked}"
                self.own[name] = asked
                body = asked.body
                tokens = self.swap_next or body["prompt"]
                self.swap_next = None
                self.add(name, tokens, 1, **body["kv_transfer_params"])
        for name, asked in [*self.own.items()]:
            if asked.gone:
                self.abort(name)
                del self.own[name]

    def _run(self, output: Any) -> None:
        step = output.kv_connector_metadata.step
        for source, into in step.lent:
            self._cache[into] = self._cache[source]
        sampled = self._forward(output)
        for load in step.loads:
            if not load.declined:
                self._transfers[load.request_id] = load
        for source, into in step.filled:
            self._cache[into] = self._cache[source]
        said = self._connector_output(output, step)
        names = [*output.num_scheduled_tokens]
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=said,
        )
        for outputs in self.scheduler.update_from_output(output, ran).values():
            for one in outputs.outputs:
                self.answers[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    own = self.own.pop(one.request_id, None)
                    if own is not None:
                        own.done.set()

    def _forward(self, output: Any) -> dict[str, list[int]]:
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            self._running[new.req_id] = tokens, list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._running[name] = list(cached.all_token_ids[name]), []
            self._running[name][1].extend(blocks[0] if blocks else ())
        before = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            (tokens, held), start = self._running[name], before[name]
            stop, values = start + count, kv_of(tokens)
            computed = self._cache[held[: -(-start // BLOCK_TOKENS)]].reshape(-1)
            assert computed[:start].tolist() == values[:start], "KV of something else"
            self._write(held, values[start:stop], start)
            request = self.scheduler.requests.get(name)
            if request is not None:
                self.computed += max(0, min(stop, request.num_prompt_tokens) - start)
            sampled[name] = []
            if stop == len(tokens):
                sampled[name] = [next_token(tokens)]
                tokens += sampled[name]
        return sampled

    def _write(self, blocks: list[int], values: list[int], start: int) -> None:
        for position, value in enumerate(values, start):
            place = blocks[position // BLOCK_TOKENS]
            self._cache[place, position % BLOCK_TOKENS] = value

    def _connector_output(self, output: Any, step: Any) -> KVConnectorOutput:
        """What the connector's workers do."""
        received, errors, reports = set(), set(), {}
        over = output.finished_req_ids
        for name, load in [*self._transfers.items()]:
            if name not in self._lost and name not in over:
                continue
            del self._transfers[name]
            lost = self._lost.pop(name, ())
            if name not in over and (missing := self._arrive(load, lost)):
                assert load.fillable
                self._landed.add(name)
                reports[name] = (1, missing)
            else:
                received.add(name)
        for name in self._landed.intersection(step.settled):
            errors.update(step.settled[name])
            received.add(name)
        received |= self._landed.intersection(over)
        self._landed -= received
        return KVConnectorOutput(
            finished_recving=received,
            invalid_block_ids=errors,
            kv_connector_worker_meta=ArrivedPrompts(reports) if reports else None,
        )

    def _arrive(self, load: LoadPrompt, lost: Collection[int]) -> list[int]:
        """Write what lands into the blocks of a request, which are still its own."""
        blocks, cached = load.blocks["0"], load.cached["0"]
        values = kv_of(self.scheduler.requests[load.request_id].prompt_token_ids)
        for place in range(cached, len(blocks)):
            start = place * BLOCK_TOKENS
            part = values[start : start + BLOCK_TOKENS]
            if place in lost:
                part = [_NOTHING] * len(part)
            self._write(blocks, part, start)
        return [blocks[place] for place in lost if place >= cached]


@contextmanager
def rig(
    model: Path,
    *,
    blocks: int = 64,
    ahead: bool = False,
    chunk: int = 1024,
    wait_s: float = 60.0,
) -> Iterator[Rig]:
    with serving() as server:
        made = Rig(
            model, server, blocks=blocks, ahead=ahead, chunk=chunk, wait_s=wait_s
        )
        try:
            yield made
        finally:
            made.scheduler.shutdown()
