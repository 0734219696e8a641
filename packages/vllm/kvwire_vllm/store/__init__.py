"""kvwire's store as a vLLM connector: engines share prefixes, which outlive them.

vLLM finds the connector by its name::

    --kv-transfer-config '{"kv_connector": "KvwireStoreConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": ["memory:4GiB", "disk:/var/kv?size=100GiB"]}}'

Only :class:`KvwireStoreConnector` needs vLLM; the two sides behind it do not:

* :class:`~kvwire_vllm.store.scheduler.StoreScheduler` decides which blocks
  are saved and loaded, and when.
* :class:`~kvwire_vllm.store.worker.StoreWorker` saves and loads them, and
  reports which blocks the store has.
"""
