"""Plain UCX by ctypes: ``ucp_get`` and ``ucp_put`` on an event loop.

As in libraries built on UCX, a process has one worker for its whole life, and closes an
endpoint by force. UCX cannot cancel a get or a put, so a cancelled call waits for its
end. Withdrawing unregisters the memory; in the variant ``ucx:force`` the endpoint is
closed by force before that. The environment chooses the transports, for example by
``UCX_TLS=tcp``.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, Final

from kvwire.memory.copy import address_of
from kvwire_certify.transport import End
from kvwire_ucx import binding, library

_REFERENCE: Final = struct.Struct("<QQ")
_Post = Callable[..., "int | None"]
# The steps of progress in one turn of the loop, which has other tasks to run as well.
_STEPS: Final = 16
_LOADED: Final = library.load()
_UCP: Final = _LOADED.ucp
# For the life of the process: the functions to call when requests end, by number.
_DONE: Final[dict[int, Callable[[int], None]]] = {}


def _on_end(request: int, status: int, number: int | None) -> None:
    _UCP.request_free(request)
    _DONE.pop(number or 0)(status)


def _on_failure(argument: int, endpoint: int, status: int) -> None:
    """Do nothing: the endpoint's operations end with that status."""


_ENDED: Final = binding.SendCallback(_on_end)
_FAILED: Final = binding.ErrorCallback(_on_failure)


def _check(status: int, what: str) -> None:
    if status != binding.OK:
        raise OSError(f"{what}: {_LOADED.status_text(status)}")


def _made(function: Any, *arguments: Any) -> ctypes.c_void_p:
    """Call a function that stores a handle at its first argument; return the handle."""
    handle = ctypes.c_void_p()
    _check(function(*arguments, ctypes.byref(handle)), str(function))
    return handle


class _Worker:
    """The worker of this process, which sleeps until UCX has something to do."""

    def __init__(self) -> None:
        params = binding.Params(
            field_mask=binding.PARAM_FEATURES,
            features=binding.FEATURE_RMA | binding.FEATURE_WAKEUP,
        )
        self.context = _made(
            _UCP.init_version,
            binding.API_MAJOR,
            binding.API_MINOR,
            ctypes.byref(params),
            None,
        )
        wanted = binding.WorkerParams(field_mask=binding.WORKER_THREAD_MODE)
        self.handle = _made(_UCP.worker_create, self.context, ctypes.byref(wanted))
        attributes = binding.WorkerAttr(field_mask=binding.WORKER_ATTR_ADDRESS)
        _check(_UCP.worker_query(self.handle, ctypes.byref(attributes)), "worker_query")
        self.address = ctypes.string_at(attributes.address, attributes.address_length)
        descriptor = ctypes.c_int()
        status = _UCP.worker_get_efd(self.handle, ctypes.byref(descriptor))
        _check(status, "worker_get_efd")
        self.number = 0
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(descriptor.value, self.progress)

    def progress(self) -> None:
        """Make progress for a while, then sleep until UCX has work."""
        for _ in range(_STEPS):
            if not _UCP.worker_progress(self.handle):
                break
        else:
            self.loop.call_soon(self.progress)
            return
        if _UCP.worker_arm(self.handle) == binding.ERR_BUSY:
            self.loop.call_soon(self.progress)

    async def ended(self, post: _Post, flags: int = 0) -> int:
        """Start an operation, and wait for its status, even if cancelled meanwhile."""
        self.number += 1
        done: asyncio.Future[int] = self.loop.create_future()
        _DONE[self.number] = functools.partial(_resolve, done)
        params = binding.RequestParams(
            op_attr_mask=binding.OP_CALLBACK | binding.OP_USER_DATA | binding.OP_FLAGS,
            flags=flags,
            callback=ctypes.cast(_ENDED, ctypes.c_void_p),
            user_data=self.number,
        )
        status, request = binding.request_of(post(ctypes.byref(params)))
        if not request:
            del _DONE[self.number]
            return status
        self.progress()
        cancelled = None
        while not done.done():
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled
        return done.result()


def _resolve(done: asyncio.Future[int], status: int) -> None:
    if not done.done():
        done.set_result(status)


# Created at the first use, because UCX then refers to it for the life of the process.
_the_worker = functools.cache(_Worker)


class UcxEnd(End):
    """An endpoint to the other process."""

    version: str = str(_LOADED.version)

    async def open(self, memory: memoryview) -> bytes:
        self.worker: Any = _the_worker()
        self.closed: bool = False
        self.handles: dict[bytes, ctypes.c_void_p] = {}
        return self.worker.address

    async def connect(self, peer: bytes) -> None:
        params = binding.EndpointParams(
            field_mask=binding.EP_REMOTE_ADDRESS
            | binding.EP_ERR_MODE
            | binding.EP_ERR_HANDLER,
            address=peer,
            err_mode=binding.ERR_MODE_PEER,
            err_callback=ctypes.cast(_FAILED, ctypes.c_void_p),
        )
        # The address contains zeros, and ctypes keeps only a pointer to it.
        address = ctypes.create_string_buffer(peer, len(peer))
        ctypes.memmove(
            ctypes.addressof(params) + binding.EndpointParams.address.offset,
            ctypes.byref(ctypes.c_void_p(ctypes.addressof(address))),
            ctypes.sizeof(ctypes.c_void_p),
        )
        self.endpoint: ctypes.c_void_p = _made(
            _UCP.ep_create, self.worker.handle, ctypes.byref(params)
        )

    async def offer(self, data: memoryview) -> bytes:
        address = address_of(data)
        params = binding.MapParams(
            field_mask=binding.MAP_ADDRESS | binding.MAP_LENGTH,
            address=address,
            length=len(data),
        )
        memory = _made(_UCP.mem_map, self.worker.context, ctypes.byref(params))
        packed = ctypes.c_void_p()
        length = ctypes.c_size_t()
        status = _UCP.rkey_pack(
            self.worker.context, memory, ctypes.byref(packed), ctypes.byref(length)
        )
        _check(status, "rkey_pack")
        key = ctypes.string_at(packed.value or 0, length.value)
        _UCP.rkey_buffer_release(packed)
        reference = _REFERENCE.pack(address, memory.value or 0) + key
        self.handles[reference] = memory
        return reference

    async def withdraw(self, reference: bytes) -> None:
        handle = self.handles.pop(reference)
        if self.variant == "force" and not self.closed:
            await self.close_by_force()
        _check(_UCP.mem_unmap(self.worker.context, handle), "mem_unmap")

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        return await self.moved(_UCP.get_nbx, reference, into, timeout_s)

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        return await self.moved(_UCP.put_nbx, reference, data, timeout_s)

    async def moved(
        self,
        call: _Post,
        reference: bytes,
        memory: memoryview,
        timeout_s: float | None,
    ) -> bool:
        """Get or put, then flush: only after that have the bytes of a put arrived."""
        theirs, _ = _REFERENCE.unpack_from(reference)
        mine = address_of(memory)
        endpoint = self.endpoint
        key = _made(_UCP.ep_rkey_unpack, endpoint, reference[_REFERENCE.size :])
        try:
            async with asyncio.timeout(timeout_s):
                status = await self.worker.ended(
                    lambda params: call(
                        endpoint, mine, len(memory), theirs, key, params
                    )
                )
                _check(status, "get or put")
                if self.closed:
                    raise ConnectionError("the endpoint was closed")
                flush = functools.partial(_UCP.ep_flush_nbx, endpoint)
                _check(await self.worker.ended(flush), "flush")
        finally:
            if not self.closed:  # a key must not outlive its endpoint
                _UCP.rkey_destroy(key)
        return True

    async def close_by_force(self) -> None:
        self.closed = True
        close = functools.partial(_UCP.ep_close_nbx, self.endpoint)
        await self.worker.ended(close, binding.CLOSE_FORCE)

    async def close(self) -> None:
        if not self.closed:
            await self.close_by_force()
        for handle in self.handles.values():
            _UCP.mem_unmap(self.worker.context, handle)


TARGET = UcxEnd
