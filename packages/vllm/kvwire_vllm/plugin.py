"""Registers kvwire's classes, so that vLLM finds them without a module's path.

The entry point ``kvwire`` in the group ``vllm.general_plugins`` names :func:`register`.
vLLM calls it in every process of every engine, even without a connector. So it imports
no part of vLLM that an engine does not import anyway, and it raises nothing.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

logger: logging.Logger = logging.getLogger("kvwire.vllm")

CONNECTORS: Final = {
    "KvwireConnector": "kvwire_vllm.connector",
    "KvwireStoreConnector": "kvwire_vllm.store.connector",
}


def register() -> None:
    """Register the connectors by name; may be called repeatedly."""
    try:
        _register()
    except Exception:
        # An engine that does not use kvwire must start all the same.
        logger.warning(
            "kvwire cannot register its names in this vLLM release: set "
            "kv_connector_module_path",
            exc_info=True,
        )


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    for name, module in CONNECTORS.items():
        with contextlib.suppress(ValueError):  # already registered
            KVConnectorFactory.register_connector(name, module, name)
