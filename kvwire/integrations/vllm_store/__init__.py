"""kvwire's store as a vLLM connector: engines share prefixes, which outlive them.

vLLM finds the connector by its name::

    --kv-transfer-config '{"kv_connector": "KvwireStoreConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": ["memory:4GiB", "disk:/var/kv?size=100GiB"]}}'

Only :class:`KvwireStoreConnector` needs vLLM; the two sides behind it do not:

* :class:`~kvwire.integrations.vllm_store.scheduler.StoreScheduler` decides which blocks
  are saved and loaded, and when.
* :class:`~kvwire.integrations.vllm_store.worker.StoreWorker` saves and loads them, and
  reports which blocks the store has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvwire.integrations.vllm_store.connector import KvwireStoreConnector

__all__ = ["KvwireStoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvwireStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvwire.integrations.vllm_store.connector import (  # noqa: PLC0415 - vLLM is heavy
        KvwireStoreConnector,
    )

    return KvwireStoreConnector
