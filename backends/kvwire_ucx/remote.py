"""One-sided access: memory that a peer may read and write without asking again.

For one trust domain. Whoever holds a remote key and the address can touch the whole
range it was packed for until it is unregistered, and nothing of kvwire's protocol
checks what it does: so lanes do not use it, and receivers name the destination of every
payload (docs/adr/0010 has what that costs). It is here for those who own both ends.

Where the transport has no such operation, UCX emulates it: the peer's worker then has
to be progressed, which its loop does.
"""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import dataclass
from typing import final

from kvwire.errors import ConnectionLost, UsageError
from kvwire_ucx import binding
from kvwire_ucx.binding import OK
from kvwire_ucx.context import Context
from kvwire_ucx.endpoint import UcxEndpoint
from kvwire_ucx.memory import MemoryHandles
from kvwire_ucx.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteKey:
    """What a peer needs to touch registered memory; it travels as the user likes.

    Attributes:
        address: Of the first byte, at its owner.
        nbytes: How many there are.
        packed: UCX's key.
    """

    address: int
    nbytes: int
    packed: bytes


@final
class Registration:
    """Memory that peers with its key may touch, until :meth:`close`.

    Args:
        context: Whose endpoints may touch it.
        memory: Contiguous and of at least 1 byte; kept alive.

    Attributes:
        key: For peers.

    Raises:
        UsageError: The memory is in pieces, or UCX cannot register it.
    """

    def __init__(self, context: Context, memory: MemoryHandles) -> None:
        if memory.datatype != binding.DATATYPE_BYTES:
            raise UsageError("ucx: memory in pieces cannot be registered as one range")
        self._context = context
        self._memory: MemoryHandles | None = memory
        self._handle = self._map(memory)
        self.key = RemoteKey(
            address=memory.address, nbytes=memory.nbytes, packed=self._pack()
        )

    def close(self) -> None:
        """Take the memory back: afterwards no key reaches it.

        What peers have under way ends before, with an error where it was too late.
        """
        handle, self._handle = self._handle, 0
        if handle:
            self._context.library.ucp.mem_unmap(self._context.handle, handle)
            self._memory = None

    def _map(self, memory: MemoryHandles) -> int:
        params = binding.MapParams(
            field_mask=binding.MAP_ADDRESS | binding.MAP_LENGTH,
            address=memory.address,
            length=memory.nbytes,
        )
        handle = ctypes.c_void_p()
        status = self._context.library.ucp.mem_map(
            self._context.handle, ctypes.byref(params), ctypes.byref(handle)
        )
        if status != OK:
            text = self._context.library.status_text(status)
            raise UsageError(f"ucx: {memory.nbytes} bytes cannot be registered: {text}")
        return handle.value or 0

    def _pack(self) -> bytes:
        ucp = self._context.library.ucp
        packed, length = ctypes.c_void_p(), ctypes.c_size_t()
        status = ucp.rkey_pack(
            self._context.handle,
            self._handle,
            ctypes.byref(packed),
            ctypes.byref(length),
        )
        if status != OK:
            text = self._context.library.status_text(status)
            self.close()
            raise UsageError(f"ucx: no remote key: {text}")
        try:
            return ctypes.string_at(packed, length.value)
        finally:
            ucp.rkey_buffer_release(packed)


@final
class RemoteMemory:
    """A peer's registered memory, as seen over one endpoint.

    Args:
        worker: Whose turns move the bytes.
        endpoint: To the owner's worker.
        key: As its owner packed it.

    Raises:
        UsageError: The key is of no use over this endpoint.
    """

    def __init__(self, worker: Worker, endpoint: UcxEndpoint, key: RemoteKey) -> None:
        self._worker = worker
        self._endpoint = endpoint
        self._key = key
        handle = ctypes.c_void_p()
        status = worker.context.library.ucp.ep_rkey_unpack(
            endpoint.handle, key.packed, ctypes.byref(handle)
        )
        if status != OK:
            text = worker.context.library.status_text(status)
            raise UsageError(f"ucx: the remote key cannot be used: {text}")
        self._handle = handle.value or 0

    def close(self) -> None:
        """Let go of the key; nothing may be under way."""
        handle, self._handle = self._handle, 0
        if handle:
            self._worker.context.library.ucp.rkey_destroy(handle)

    async def put(self, source: MemoryHandles, offset: int = 0) -> None:
        """Write ``source`` at ``offset``; returns when it is there.

        Raises:
            UsageError: The range is not inside the peer's memory.
            ConnectionLost: The endpoint has failed.

        Cancel safety: not safe. The operation runs on, and UCX keeps the memory.
        """
        ucp, endpoint = self._worker.context.library.ucp, self._endpoint.handle
        place = self._place(source, offset)
        await self._over(
            source,
            lambda params: ucp.put_nbx(
                endpoint, source.address, source.count, place, self._handle, params
            ),
        )
        # A put is over when its source is free: only a flush says that it has arrived.
        await self._over(None, lambda params: ucp.ep_flush_nbx(endpoint, params))

    async def get(self, destination: MemoryHandles, offset: int = 0) -> None:
        """Read into ``destination`` from ``offset`` on; returns when it is there.

        Raises:
            UsageError: The range is not inside the peer's memory.
            ConnectionLost: The endpoint has failed.

        Cancel safety: not safe. The operation runs on, and UCX keeps the memory.
        """
        ucp, endpoint = self._worker.context.library.ucp, self._endpoint.handle
        place = self._place(destination, offset)
        await self._over(
            destination,
            lambda params: ucp.get_nbx(
                endpoint,
                destination.address,
                destination.count,
                place,
                self._handle,
                params,
            ),
        )

    def _place(self, memory: MemoryHandles, offset: int) -> int:
        if memory.datatype != binding.DATATYPE_BYTES:
            raise UsageError("ucx: put and get move one contiguous range each")
        if offset < 0 or offset > self._key.nbytes - memory.nbytes:
            raise UsageError(
                f"ucx: range {offset}+{memory.nbytes} of {self._key.nbytes} bytes"
            )
        return self._key.address + offset

    async def _over(self, keeps: object, call: binding.Post) -> None:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def tell(status: int, _nbytes: int) -> None:
            if not done.done():
                done.set_result(status)

        self._worker.post(tell, keeps, call)
        status = await done
        if status != OK:
            text = self._worker.context.library.status_text(status)
            raise ConnectionLost(f"ucx: one-sided access failed: {text}")
