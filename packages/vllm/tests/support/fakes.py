"""vLLM's scheduler as far as the connector looks at it, and two workers' memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

import kvwire
from kvwire_vllm.caches import CacheShape, stage_layers
from kvwire_vllm.config import VllmSettings
from kvwire_vllm.worker import WorkerSide
from tests.support.simulated_device import (
    SimulatedArray,
    SimulatedDevice,
    SimulatedStream,
)

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, DIM = 3, 16, 4, 4, 8
SHAPE = CacheShape(
    block_tokens=BLOCK_TOKENS, kv_heads=HEADS, total_kv_heads=HEADS, head_dim=DIM
)
NAMES = tuple(f"model.layers.{index}.self_attn.attn" for index in range(LAYERS))
FREE = -1.0
# vLLM's names of how the axes (layer, block, head, token, content) follow each other in
# memory; test_connector.py compares them with its own.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass
class Feature:
    """A picture or a sound of a request, by the name that vLLM gives to its content."""

    identifier: str
    mm_position: Any = None


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    mm_features: list[Feature] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    max_tokens: int = 1
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    prompt_embeds: object = None
    num_computed_tokens: int = 1  # 0 once vLLM has preempted it
    lora_request: Any = None

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)
        self._all_token_ids = self.all_token_ids  # vLLM's own list behind that
        self.num_prompt_tokens = len(self.prompt_token_ids)


@dataclass
class New:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Output:
    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    preempted_req_ids: set[str] | None = None


def vllm_configs(
    *groups: object,
    dtype: str = "auto",
    scales: bool = False,
    kv_heads: int = 8,
    layers: tuple[int, int] = (5, 11),
    role: str = "kv_both",
    **parallel: Any,
) -> tuple[Any, Any]:
    """vLLM's two configs, as far as they are looked at; a model of 11 layers."""
    sizes = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "rank": 0}
    said = SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: kv_heads,
            get_total_num_hidden_layers=lambda: 11,
            get_layers_start_end_indices=lambda _: layers,
            hf_config=SimpleNamespace(to_dict=dict),
            revision=None,
            quantization=None,
            seed=0,
            get_diff_sampling_param=dict,
            generation_config="auto",
            override_generation_config={},
        ),
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        cache_config=SimpleNamespace(cache_dtype=dtype, calculate_kv_scales=scales),
        compilation_config=SimpleNamespace(static_forward_context={}),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={}, engine_id="0", kv_role=role
        ),
    )
    caches = [
        SimpleNamespace(kv_cache_spec=group, layer_names=[f"layers.{index}"])
        for index, group in enumerate(groups)
    ]
    return said, SimpleNamespace(kv_cache_groups=caches)


def in_order(order: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values, in memory in this order of axes."""
    axes = ORDERS[order]
    made = np.ascontiguousarray(values.transpose(axes))
    return made.transpose(np.argsort(axes))


def chunk(request_id: str, blocks: list[int], computed: int, tokens: int) -> Output:
    cached = Cached([request_id], [(blocks,) if blocks else None], [computed])
    return Output({request_id: tokens}, scheduled_cached_reqs=cached)


class Worker:
    """A worker side and its memory: the layout of vLLM since 0.30.

    On a device, what the model does is queued as its kernels are.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        device: SimulatedDevice | None = None,
        order: str = "LBHNC",
        stage: tuple[int, int] = (0, 1),
        block_tokens: int = BLOCK_TOKENS,
        **settings: Any,
    ) -> None:
        own = settings.pop("config", {})  # kvwire's, beside the lease
        config = kvwire.Config.load(lease_s=settings.pop("lease_s", 30.0), **own)
        patience = settings.pop("patience", None)
        self.heads = max(1, HEADS // ranks)
        self.layers = stage_layers(LAYERS, stage[1])[stage[0]]
        self.shape = replace(
            SHAPE,
            kv_heads=self.heads,
            rank=rank,
            ranks=ranks,
            stage=stage,
            first_layer=self.layers.start,
            model_layers=LAYERS,
            block_tokens=block_tokens,
        )
        settings = {"group_bytes": 0, **settings}
        self.side = WorkerSide(
            VllmSettings(**settings), config, [self.shape], patience=patience
        )
        shape = (len(self.layers), BLOCKS, self.heads, block_tokens, 2 * DIM)
        views = in_order(order, np.full(shape, FREE, np.float32))
        names = NAMES[self.layers.start : self.layers.stop]
        self.tensors = dict(zip(names, views, strict=True))
        self.arrays: dict[str, SimulatedArray] = {}
        # The stream of its kernels, on a device.
        self.compute: SimulatedStream | None = None
        self.device = device
        if device is not None:
            self.compute = device.stream()
            device.set_current(self.compute)
            self.arrays = {n: device.array(t) for n, t in self.tensors.items()}
        self.first_head = rank * self.heads
        self.side.register(self.arrays or self.tensors)

    def close(self) -> None:
        self.side.close()
        if self.compute is not None:
            with suppress(RuntimeError):  # a test had the device fail
                self.compute.record().synchronize()
            self.compute.close()

    def write(self, name: str, blocks: list[int]) -> None:
        """What prefill leaves: position in the prompt, head and layer, in each."""
        layer, tensor = NAMES.index(name), self.tensors[name]
        for position, block in enumerate(blocks):
            for head in range(self.heads):
                value = 10_000 * layer + 100 * position + self.first_head + head
                tensor[block, head] = value
        if self.compute is not None:
            array, values = self.arrays[name], tensor.copy()
            self.compute.call(lambda: array.write(values))

    def read(self, name: str) -> npt.NDArray[Any]:
        """What a layer's cache holds now, wherever it lies."""
        return self.arrays[name].read() if self.arrays else self.tensors[name]

    def holds(self, blocks: list[int], layers: int = LAYERS) -> bool:
        """Whether these blocks hold what ``write`` leaves, on whichever rank."""
        for layer, name in enumerate(NAMES[:layers]):
            if layer not in self.layers:
                continue
            tensor = self.read(name)
            for position, block in enumerate(blocks):
                for head in range(self.heads):
                    want = 10_000 * layer + 100 * position + self.first_head + head
                    if not (tensor[block, head] == want).all():
                        return False
        return True

    def forward(self, blocks: list[int]) -> None:
        """Write every layer, with the hooks around each."""
        for name in self.tensors:
            self.write(name, blocks)
            self.side.layer_written(name)
        self.side.step_written()
