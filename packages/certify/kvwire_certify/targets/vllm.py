"""vLLM's KV connectors, such as NixlConnector, between two engines without a model.

The variant is a connector's name, ``vllm:NixlConnector`` by default. Each end has both
parts of a connector, scheduler and worker, with a cache of one layer over its memory,
and makes the calls that an engine makes. An offer is a prompt that prefill has
computed; its reference is prefill's answer. Withdrawing waits until the connector gives
the blocks back, because decode has fetched them or the lease has ended. A cancelled
call aborts its request, and ends when the connector gives the request's blocks back.

An engine's reference can be used only once, so an offer consists of a few prompts that
share their blocks, like prompts with a common prefix.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import functools
import itertools
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Final

# vLLM reads these when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import msgspec
import torch
import vllm
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    SupportsHMA,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvwire.aio import start_task
from kvwire.memory.copy import address_of
from kvwire_certify.transport import End

# A block of 4 KiB, the smallest slot of a schedule: keys and values of 32 tokens, with
# one head of 16 numbers.
_BLOCK_BYTES: Final = 4096
_BLOCK_TOKENS: Final = 32
_HEADS: Final = 1
_HEAD_NUMBERS: Final = 16
_LAYER: Final = "model.layers.0.self_attn.attn"
_MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HEADS * _HEAD_NUMBERS,
    "intermediate_size": _HEADS * _HEAD_NUMBERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
}
_USES: Final = 6
_LEASE_S: Final = 2
# The time between two steps of an engine, and of an engine that only waits for others.
_STEP_S: Final = 0.002
_IDLE_STEP_S: Final = 0.02


@functools.cache
def _engine_config() -> Any:
    """Return the config of an engine whose model is never loaded."""
    with tempfile.TemporaryDirectory(prefix="kvwire-certify-") as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=1 << 17,
            dtype="float32",
            enforce_eager=True,
            block_size=_BLOCK_TOKENS,
        ).create_engine_config()
    config.model_config.model = "certify"  # the same on both ends
    config.cache_config.kv_cache_layout = "LBHNC"
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            1, 0, f"tcp://127.0.0.1:{_free_port()}", 0, "gloo"
        )
        parallel_state.ensure_model_parallel_initialized(1, 1)
    return config


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


class VllmEnd(End):
    """An engine without its model."""

    version: str = vllm.__version__

    async def open(self, memory: memoryview) -> bytes:
        self.start: int = address_of(memory)
        self.numbers: itertools.count[int] = itertools.count()
        self.held: set[str] = set()
        self.freed: asyncio.Event = asyncio.Event()
        self.fetching: dict[str, asyncio.Future[bool]] = {}
        self.used: collections.Counter[bytes] = collections.Counter()
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())
        os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(_free_port())
        spec = FullAttentionSpec(
            block_size=_BLOCK_TOKENS,
            num_kv_heads=_HEADS,
            head_size=_HEAD_NUMBERS,
            dtype=torch.float32,
        )
        cache = torch.frombuffer(memory, dtype=torch.float32).view(
            -1, _HEADS, _BLOCK_TOKENS, 2 * _HEAD_NUMBERS
        )
        caches = KVCacheConfig(len(cache), [], [KVCacheGroupSpec([_LAYER], spec)])
        config = copy.copy(_engine_config())
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=self.variant or "NixlConnector",
            kv_role="kv_both",
            kv_buffer_device="cpu",
            kv_connector_extra_config={"kv_lease_duration": _LEASE_S},
        )
        cores = os.sched_getaffinity(0)
        with set_current_vllm_config(config):
            make = functools.partial(KVConnectorFactory.create_connector, config)
            self.scheduler: Any = make(KVConnectorRole.SCHEDULER, caches)
            self.worker: Any = make(KVConnectorRole.WORKER, caches)
            self.worker.register_kv_caches({_LAYER: cache})
        os.sched_setaffinity(0, cores)  # an engine reserves a core for its transfers
        handshake = self.worker.get_handshake_metadata()
        if handshake is not None:
            self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self.steps: asyncio.Task[None] = start_task(self.run())
        return b""

    async def offer(self, data: memoryview) -> bytes:
        answers = [self.prefilled(self.blocks(data)) for _ in range(_USES)]
        self.step()
        return msgspec.json.encode(answers)

    async def withdraw(self, reference: bytes) -> None:
        names = {each["remote_request_id"] for each in msgspec.json.decode(reference)}
        while names & self.held:
            self.freed.clear()
            await self.freed.wait()

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        answers = msgspec.json.decode(reference)
        params = answers[self.used[reference] % _USES]
        self.used[reference] += 1
        request = self.added(self.blocks(into), params)
        name = request.request_id
        arrived = asyncio.get_running_loop().create_future()
        self.fetching[name] = arrived
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(arrived)
        finally:
            if not arrived.done():
                self.finish(request, RequestStatus.FINISHED_ABORTED, [])
            await asyncio.wait([arrived])

    async def close(self) -> None:
        self.steps.cancel()
        await asyncio.wait([self.steps])
        self.worker.shutdown()
        self.scheduler.shutdown()
        self.give_up(ConnectionError("the engine was closed"))

    # --- an engine --------------------------------------------------------------------

    def blocks(self, data: memoryview) -> list[int]:
        """Return the numbers of the blocks that some memory consists of."""
        first = (address_of(data) - self.start) // _BLOCK_BYTES
        return [*range(first, first + len(data) // _BLOCK_BYTES)]

    def added(self, blocks: list[int], params: dict[str, Any]) -> Request:
        """Add a request with the given blocks; decode fetches their content."""
        sampling = SamplingParams(max_tokens=1)
        sampling.extra_args = {"kv_transfer_params": params}
        tokens = [0] * (len(blocks) * _BLOCK_TOKENS)
        request = Request(f"cmpl-{next(self.numbers)}", tokens, sampling, None)
        self.scheduler.on_new_request(request)
        fetched, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        allocated = KVCacheBlocks(([KVCacheBlock(block) for block in blocks],))
        self.scheduler.update_state_after_alloc(request, allocated, fetched)
        return request

    def prefilled(self, blocks: list[int]) -> Any:
        """Run prefill for a prompt, and return prefill's answer."""
        request = self.added(blocks, {"do_remote_decode": True})
        self.step(NewRequestData.from_request(request, (blocks,)))
        request.num_computed_tokens = request.num_prompt_tokens
        delayed, params = self.finish(
            request, RequestStatus.FINISHED_LENGTH_CAPPED, blocks
        )
        if delayed:
            self.held.add(request.request_id)
        return params

    def finish(
        self, request: Request, status: RequestStatus, blocks: list[int]
    ) -> tuple[bool, Any]:
        """End a request; return whether its blocks are still held, and its answer."""
        request.status = status
        if isinstance(self.scheduler, SupportsHMA):
            ended = self.scheduler.request_finished_all_groups(request, (blocks,))
        else:
            ended = self.scheduler.request_finished(request, blocks)
        held, answer = ended
        return held, answer

    async def run(self) -> None:
        """Step like an engine until it is closed."""
        try:
            while True:
                await asyncio.sleep(_STEP_S if self.fetching else _IDLE_STEP_S)
                if self.fetching or self.held:
                    self.step()
        except Exception as exc:
            self.give_up(exc)
            raise

    def step(self, *new: NewRequestData) -> None:
        """Run one step, and record the requests whose KV has arrived or was sent."""
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [*new]
        for one in new:
            output.num_scheduled_tokens[one.req_id] = len(one.prompt_token_ids or ())
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        worker = self.worker
        worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        failed = worker.get_block_ids_with_load_errors()
        worker.clear_connector_metadata()
        self.scheduler.update_connector_output(
            KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=failed,
            )
        )
        self.held -= results.finished_sending
        if results.finished_sending:
            self.freed.set()
        for name in results.finished_recving:
            self.fetching.pop(name).set_result(name not in results.failed_recving)

    def give_up(self, error: Exception) -> None:
        """Fail all requests that wait for KV."""
        for arrived in self.fetching.values():
            arrived.set_exception(error)
        self.fetching.clear()
        self.held.clear()
        self.freed.set()


TARGET = VllmEnd
