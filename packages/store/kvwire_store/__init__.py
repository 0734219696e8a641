"""The KV store: keeps blocks of KV cache by hash, in memory, on disks and in services.

>>> async with kvwire_store.BlockStore.open(["memory:8GiB"]) as store:
...     await store.put(hashes, cache, blocks)
...     found = await store.match(hashes, other)
...     outcome = await store.get(hashes[:found], other, free_blocks[:found])
"""

from kvwire_store.placement import BlockState, Placement
from kvwire_store.request import StoreRequest
from kvwire_store.server.server import StoreServer
from kvwire_store.store import BlockStore

__all__ = ["BlockState", "BlockStore", "Placement", "StoreRequest", "StoreServer"]
