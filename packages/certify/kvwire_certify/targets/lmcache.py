"""LMCache's L2 adapters: one object for each offer.

The variant is an adapter's config as LMCache reads it, such as ``lmcache:{"type":
"resp", "host": "127.0.0.1", "port": 6379}``; by default ``fs`` in a temporary folder.
An adapter cannot cancel a task, so a cancelled call waits for the task's end.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
from importlib import metadata
from typing import Any, Final

# LMCache reads it when it is imported.
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform.event_notifier import consume_fd

from kvwire.memory.copy import address_of
from kvwire_certify.transport import End

# The imports of an adapter's first use take seconds, so they are made here.
get_l2_adapter_config_class("fs")

_MODEL: Final = "certify"


def _object(data: memoryview) -> TensorMemoryObj:
    raw = torch.frombuffer(data, dtype=torch.uint8)
    about = MemoryObjMetadata(raw.shape, raw.dtype, address_of(data), len(data), 1)
    return TensorMemoryObj(raw, about, None)


class LmcacheEnd(End):
    """One end, with its own LMCache adapter over the storage that both ends share."""

    version = metadata.version("lmcache")

    async def open(self, memory: memoryview) -> bytes:
        self.memory = memory
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.folder = tempfile.mkdtemp(prefix="kvwire-certify-")
        return self.folder.encode()

    async def connect(self, peer: bytes) -> None:
        shared = min(self.folder, peer.decode())
        config = {"type": "fs", "base_path": shared}
        if self.variant:
            config = json.loads(self.variant)
        kind = get_l2_adapter_config_class(config["type"])
        arena = L1MemoryDesc(address_of(self.memory), len(self.memory), 4096)
        self.adapter: Any = create_l2_adapter(kind.from_dict(config), arena)
        self.loop = asyncio.get_running_loop()
        self.descriptors = (
            self.adapter.get_store_event_fd(),
            self.adapter.get_load_event_fd(),
        )
        for descriptor, ended in zip(
            self.descriptors, (self.stored, self.loaded), strict=True
        ):
            self.loop.add_reader(descriptor, ended, descriptor)

    async def offer(self, data: memoryview) -> bytes:
        reference = secrets.token_bytes(32)
        keys = [ObjectKey(reference, _MODEL, 0)]
        store = self.ended(self.adapter.submit_store_task(keys, [_object(data)]))
        if not (await store).is_successful():
            raise OSError("the object was not stored")
        return reference

    async def withdraw(self, reference: bytes) -> None:
        key = ObjectKey(reference, _MODEL, 0)
        await asyncio.to_thread(self.adapter.delete, [key])

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        keys = [ObjectKey(reference, _MODEL, 0)]
        load = self.ended(self.adapter.submit_load_task(keys, [_object(into)]))
        try:
            async with asyncio.timeout(timeout_s):
                found = await asyncio.shield(load)
        finally:
            await asyncio.wait([load])
        return bool(found.test(0))

    def ended(self, number: int) -> asyncio.Future[Any]:
        """Return a future for the result of a task."""
        self.waiting[number] = self.loop.create_future()
        return self.waiting[number]

    def stored(self, descriptor: int) -> None:
        consume_fd(descriptor)
        for number, result in self.adapter.pop_completed_store_tasks().items():
            self.waiting.pop(number).set_result(result)

    def loaded(self, descriptor: int) -> None:
        consume_fd(descriptor)
        for number in [*self.waiting]:
            found = self.adapter.query_load_result(number)
            if found is not None:
                self.waiting.pop(number).set_result(found)

    async def close(self) -> None:
        for descriptor in self.descriptors:
            self.loop.remove_reader(descriptor)
        await asyncio.to_thread(self.adapter.close)
        for waiting in self.waiting.values():
            waiting.set_exception(ConnectionError("the adapter was closed"))
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


TARGET = LmcacheEnd
