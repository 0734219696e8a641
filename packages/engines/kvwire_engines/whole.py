"""The state of a sequence that cannot be cut by tokens, in a store.

Behind a window a cache has dropped its first tokens, so it is of use to prompts only
that begin with all of its tokens. It is kept whole: a head of :data:`HEAD_BYTES` that
describes the layers, under the hash of the tokens, and a body with their bytes, under
the hash of tokens and head: the same tokens may have been kept in another order. The
body is stored first, so a head is found only if there was a body.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvwire import KVSpec, PagedCache
from kvwire.errors import UsageError
from kvwire.kv.hashing import HashScheme
from kvwire.kv.layout import AxisOrder
from kvwire.kv.spec import KV_STATE_BYTES_MAX
from kvwire_store import BlockStore

# A layer takes about 50 bytes; models have at most 200 layers.
HEAD_BYTES: Final = 16_384
Bytes = npt.NDArray[np.uint8]


class KeptLayer(msgspec.Struct, frozen=True, array_like=True):
    """One layer of a whole state.

    Attributes:
        kind: The layer's class.
        rows: The tokens whose keys and values it still has.
        numbers: What else the engine needs to go on, such as the place of the next row.
    """

    kind: str
    rows: int
    numbers: list[int]


_HEAD: Final = msgspec.json.Decoder(list[KeptLayer])


class State(NamedTuple):
    """A whole state: its layers, and all their bytes, one layer after the other."""

    layers: list[KeptLayer]
    body: Bytes


class WholeStates:
    """The whole states of one model in a store.

    Args:
        store: The store.
        name: What the states depend on, besides tokens.
        row_bytes: Bytes of a token's keys and values in one layer.
        tenant: The tenant that owns them.
    """

    def __init__(
        self, store: BlockStore, name: str, row_bytes: int, tenant: str
    ) -> None:
        self._store = store
        self._name = name
        self._row_bytes = row_bytes
        self._tenant = tenant

    async def put(self, tokens: npt.NDArray[np.int64], state: State) -> bool:
        """Store a state; return whether all of it is stored.

        Raises:
            UsageError: It has more than 1 GiB, or too many layers.

        Cancel safety: cancelling stops the waiting, not the put; await it to its end.
        """
        head = msgspec.json.encode(state.layers)
        if len(head) > HEAD_BYTES or state.body.size > KV_STATE_BYTES_MAX:
            raise UsageError(
                f"a whole state of {len(state.layers)} layers and {state.body.size} "
                f"bytes: at most {KV_STATE_BYTES_MAX} bytes are kept"
            )
        padded = np.frombuffer(head.ljust(HEAD_BYTES), np.uint8)
        body = body_key(tokens, padded)
        return await self.write("body", body, state.body) and await self.write(
            "head", head_key(tokens), padded
        )

    async def write(self, part: str, key: bytes, memory: Bytes) -> bool:
        """Store one part of a state; return whether it is stored.

        Cancel safety: as for :meth:`put`.
        """
        request = self._store.put(
            [key], self._page(part, memory), [0], tenant=self._tenant
        )
        outcome = await request
        await request.drained()
        return outcome.complete

    async def longest(self, tokens: npt.NDArray[np.int64]) -> int:
        """Return how many leading tokens the longest stored state covers.

        Cancel safety: safe, it only reads.
        """
        hashes = HashScheme(1).block_hashes(tokens)
        probe = self._page("head", np.empty(HEAD_BYTES, np.uint8))
        here = await self._store.present(hashes, probe, tenant=self._tenant)
        return 1 + int(max(np.flatnonzero(here), default=-1))

    async def get(self, tokens: npt.NDArray[np.int64]) -> State | None:
        """Return the state of these tokens; None if it is gone or not well formed.

        Cancel safety: safe, it reads into memory of its own.
        """
        head = await self._read("head", head_key(tokens), HEAD_BYTES)
        if head is None:
            return None
        try:
            layers = _HEAD.decode(head.tobytes())
        except msgspec.DecodeError:
            return None
        rows = [layer.rows for layer in layers]
        # A row can be no token before the first, nor one that was never seen.
        if not rows or min(rows) < 1 or max(rows) > tokens.size:
            return None
        nbytes = sum(rows) * self._row_bytes
        if nbytes > KV_STATE_BYTES_MAX:
            return None
        body = await self._read("body", body_key(tokens, head), nbytes)
        return None if body is None else State(layers, body)

    async def _read(self, part: str, key: bytes, nbytes: int) -> Bytes | None:
        memory = np.empty(nbytes, np.uint8)
        outcome = await self._store.get(
            [key], self._page(part, memory), [0], tenant=self._tenant
        )
        return memory if outcome.complete else None

    def _page(self, part: str, memory: Bytes) -> PagedCache:
        spec = KVSpec(
            layers=1,
            kv_heads=1,
            head_dim=memory.size,
            block_tokens=1,
            dtype="uint8",
            components=1,
            fingerprint=f"{self._name} {part}",
            kind="state",
        )
        return PagedCache(spec, [memory[None]], AxisOrder("block dim"))


def joined(rows: Sequence[Any]) -> Bytes:
    """Return the bytes of arrays, one after the other."""
    return np.concatenate(
        [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in rows]
    )


def head_key(tokens: npt.NDArray[np.int64]) -> bytes:
    """Return the key of the head for these tokens."""
    return HashScheme(1).block_hashes(tokens)[-1]


def body_key(tokens: npt.NDArray[np.int64], head: Bytes) -> bytes:
    """Return the key of the body that belongs to a head."""
    key = head_key(tokens)
    return sha256(key + head.tobytes()).digest()[: len(key)]
