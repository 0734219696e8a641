"""Memory that the peer may read: exact ranges registered with UCX, and their keys.

A key allows reading one range. On a network card it is valid until the range is
unregistered, which happens when the window is concealed or the lane has ended.
"""

from __future__ import annotations

import ctypes
from typing import Final, final

from kvwire.errors import BackendUnavailable
from kvwire_ucx import binding
from kvwire_ucx.binding import OK
from kvwire_ucx.context import Context

_READ_ONLY: Final = binding.PROTECTION_LOCAL_READ | binding.PROTECTION_REMOTE_READ


@final
class Registration:
    """The registration of one range for reading, until it is closed.

    Raises:
        BackendUnavailable: UCX refuses it.
    """

    __slots__ = (
        "_context",
        "_handle",
        "address",
        "key",
        "nbytes",
    )

    def __init__(self, context: Context, address: int, nbytes: int) -> None:
        self._context = context
        self.address = address
        self.nbytes = nbytes
        self._handle = self._map()
        try:
            self.key = self._pack()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregister the range; its key is then invalid."""
        handle = self._handle
        self._handle = 0
        if handle:
            self._context.library.ucp.mem_unmap(self._context.handle, handle)

    def _map(self) -> int:
        params = binding.MapParams(
            field_mask=binding.MAP_ADDRESS
            | binding.MAP_LENGTH
            | binding.MAP_PROTECTION,
            address=self.address,
            length=self.nbytes,
            prot=_READ_ONLY,
        )
        handle = ctypes.c_void_p()
        status = self._context.library.ucp.mem_map(
            self._context.handle, ctypes.byref(params), ctypes.byref(handle)
        )
        self._check(status, "registered")
        return handle.value or 0

    def _pack(self) -> bytes:
        ucp = self._context.library.ucp
        packed = ctypes.c_void_p()
        length = ctypes.c_size_t()
        status = ucp.rkey_pack(
            self._context.handle,
            self._handle,
            ctypes.byref(packed),
            ctypes.byref(length),
        )
        self._check(status, "exposed")
        try:
            return ctypes.string_at(packed, length.value)
        finally:
            ucp.rkey_buffer_release(packed)

    def _check(self, status: int, what: str) -> None:
        if status != OK:
            text = self._context.library.status_text(status)
            raise BackendUnavailable(
                f"ucx: {self.nbytes} bytes cannot be {what} for reading: {text}; "
                f"ulimit -l limits what RDMA may lock"
            )
