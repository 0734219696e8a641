"""A connector for vLLM that does nothing: what is left is vLLM's own part."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base


class BareMetadata(base.KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed
    """Nothing, for the workers of a step."""


class BareConnector(base.KVConnectorBase_V1):  # type: ignore[misc]  # likewise
    """Has no blocks, and wants none."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Note nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> BareMetadata:
        return BareMetadata()
