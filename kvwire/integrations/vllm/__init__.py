"""kvwire as a KV connector of vLLM: prefill in one engine, decode in another.

vLLM finds it by its name::

    --kv-transfer-config '{"kv_connector": "KvwireConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"listen": "127.0.0.1:7400"}}'

``python -m kvwire.integrations.vllm.proxy`` sends each request to both engines. Only
:class:`KvwireConnector` needs vLLM. Its parts can be tested without vLLM:

* :class:`~kvwire.integrations.vllm.scheduler.SchedulerSide` decides what moves, and
  when.
* :class:`~kvwire.integrations.vllm.worker.WorkerSide` moves it.
* :class:`~kvwire.integrations.vllm.metadata.WorkerStep` is the message from the first
  to the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvwire.integrations.vllm.connector import KvwireConnector

__all__ = ["KvwireConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvwireConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvwire.integrations.vllm.connector import (  # noqa: PLC0415 - vLLM is heavy
        KvwireConnector,
    )

    return KvwireConnector
