"""kvwire under vLLM: prefill in one engine, decode in another, and a store for both.

vLLM finds the connector by its name::

    --kv-transfer-config '{"kv_connector": "KvwireConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"listen": "127.0.0.1:7400"}}'

``python -m kvwire_vllm.proxy`` sends each request to both engines. Only
:mod:`kvwire_vllm.connector` needs vLLM. Its parts can be tested without vLLM:

* :class:`~kvwire_vllm.scheduler.SchedulerSide` decides what moves, and when.
* :class:`~kvwire_vllm.worker.WorkerSide` moves it.
* :class:`~kvwire_vllm.metadata.WorkerStep` is the message from the first to the second.
"""
