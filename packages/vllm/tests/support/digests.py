"""What lies in a worker's KV caches, as a method that vLLM adds to its worker.

``--worker-extension-cls`` names the class, and the server's ``/collective_rpc`` calls
it where ``VLLM_SERVER_DEV_MODE`` is set.
"""

from __future__ import annotations

from typing import Any, Protocol

import xxhash


class HasCaches(Protocol):
    """vLLM's worker as far as this looks at it."""

    model_runner: Any


class CacheDigests:
    def block_digests(self: HasCaches) -> list[list[str]]:
        """Of each block that was ever written to, layer by layer."""
        return [
            [
                xxhash.xxh3_64_hexdigest(block.numpy().tobytes())
                for block in layer
                if block.any()
            ]
            for layer in self.model_runner.kv_caches
        ]
