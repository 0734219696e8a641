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

_STORE: Final = "kvwire_vllm.store"
CONNECTORS: Final = {
    "KvwireConnector": "kvwire_vllm.connector",
    "KvwireStoreConnector": f"{_STORE}.connector",
}
TIERS: Final = {"KvwireTier": f"{_STORE}.tier"}


def register() -> None:
    """Register the connectors and the tier by name; may be called repeatedly."""
    try:
        _register()
    except Exception:
        # An engine that does not use kvwire must start all the same.
        logger.warning(
            "kvwire cannot register its names in this vLLM release: set "
            "kv_connector_module_path and module_path",
            exc_info=True,
        )


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )
    from vllm.v1.kv_offload.tiering.factory import (  # noqa: PLC0415 - likewise heavy
        SecondaryTierFactory,
    )

    for add, names in (
        (KVConnectorFactory.register_connector, CONNECTORS),
        (SecondaryTierFactory.register_tier, TIERS),
    ):
        for name, module in names.items():
            with contextlib.suppress(ValueError):  # already registered
                add(name, module, name)
