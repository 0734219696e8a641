"""vLLM's secondary offloading tiers: one chunk for each 4 KiB of an offer.

The variant is a tier's config as vLLM reads it, by default ``fs`` in a temporary
folder. Each end's memory is its primary tier, since each engine has its own. A tier can
neither drop chunks nor cancel a job: withdrawn chunks stay, and a cancelled call waits
for its job's end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import tempfile
from types import SimpleNamespace
from typing import Any, Final

# vLLM reads these when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import numpy as np
import vllm
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvwire.memory.copy import address_of
from kvwire_certify.transport import End

# Most of the modules that this tier imports are needed by all tiers, and importing them
# takes seconds.
SecondaryTierFactory.get_tier_class({"type": "fs"})

_CHUNK_BYTES: Final = 4096
_STEP_S: Final = 0.002
_CONFIG: Final = OffloadingConfig(
    groups=(OffloadingGroupConfig(16, ("layers.0",), 0),),
    worker_kv_bytes_per_block=_CHUNK_BYTES,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="0",
    model=OffloadingModelConfig("certify", "bfloat16"),
    cache=OffloadingCacheConfig(16, 1),
    parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
)


class VllmTierEnd(End):
    """One end's tier, over storage that both ends share."""

    version = vllm.__version__

    async def open(self, memory: memoryview) -> bytes:
        self.memory = memory
        self.numbers = itertools.count()
        self.results: dict[int, bool] = {}
        self.closed = False
        self.folder = tempfile.mkdtemp(prefix="kvwire-certify-")
        return self.folder.encode()

    async def connect(self, peer: bytes) -> None:
        config = {"type": "fs", "root_dir": min(self.folder, peer.decode())}
        if self.variant:
            config = json.loads(self.variant)
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(
            config,
            self.memory.cast("B", (len(self.memory) // _CHUNK_BYTES, _CHUNK_BYTES)),
            SimpleNamespace(config=_CONFIG, blocks_per_chunk=1),
        )

    async def offer(self, data: memoryview) -> bytes:
        reference = secrets.token_bytes(28)
        store = self.job(reference, data, loads=False)
        self.tier.submit_store(store)
        if not await self.ended(store.job_id):
            raise OSError("the chunks were not stored")
        return reference

    async def withdraw(self, reference: bytes) -> None:
        """Do nothing: chunks are named by their content, and do not end."""

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        job = self.job(reference, into, loads=True)
        self.tier.submit_load(job)
        load = asyncio.ensure_future(self.ended(job.job_id))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(load)
        finally:
            await asyncio.wait([load])

    def job(self, reference: bytes, data: memoryview, *, loads: bool) -> TransferJob:
        first = (address_of(data) - address_of(self.memory)) // _CHUNK_BYTES
        count = len(data) // _CHUNK_BYTES
        keys = [
            make_offload_key(reference + number.to_bytes(4, "big"), 0)
            for number in range(count)
        ]
        number = next(self.numbers)
        chunks = np.arange(first, first + count)
        return TransferJob(number, keys, chunks, loads, ReqContext(str(number)))

    async def ended(self, number: int) -> bool:
        """Poll for the end of a job as often as an engine steps."""
        while number not in self.results:
            if self.closed:
                raise ConnectionError("the tier was closed")
            await asyncio.sleep(_STEP_S)
            for result in self.tier.get_finished_jobs():
                self.results[result.job_id] = result.success
        return self.results.pop(number)

    async def close(self) -> None:
        await asyncio.to_thread(self.tier.shutdown)
        self.closed = True
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


TARGET = VllmTierEnd
