"""Memory that the peer may read: exact ranges registered with UCX, with their keys.

A key allows reading one range. For a network card it is valid until the range is
unregistered. So that happens as soon as the payload has been read or the lane has
ended. A few ranges may stay registered, for long-lived caches; see ``registrations`` in
:mod:`kvwire_ucx.settings`.
"""

from __future__ import annotations

import ctypes
from typing import Final, final

from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
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
        "_owner",
        "address",
        "key",
        "nbytes",
        "users",
    )

    def __init__(
        self, context: Context, address: int, nbytes: int, owner: object
    ) -> None:
        self._context = context
        self._owner: object = owner
        self.address = address
        self.nbytes = nbytes
        self.users = 0
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
        self._owner = None

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
        self._check(status, "lent")
        try:
            return ctypes.string_at(packed, length.value)
        finally:
            ucp.rkey_buffer_release(packed)

    def _check(self, status: int, what: str) -> None:
        if status != OK:
            text = self._context.library.status_text(status)
            raise BackendUnavailable(
                f"ucx: {self.nbytes} bytes cannot be {what} for reading: {text}; "
                f'ulimit -l limits what RDMA may lock, or set one_sided="no"'
            )


@final
class Registrations:
    """The registered ranges of one lane."""

    def __init__(self, context: Context, spare_max: int) -> None:
        self._context = context
        self._spare_max = spare_max
        self._by_range: dict[tuple[int, int], Registration] = {}
        # Ranges that no payload uses; the most recently used is last.
        self._spare: dict[tuple[int, int], None] = {}

    def __len__(self) -> int:
        """Return how many ranges are registered, including unused ones."""
        return len(self._by_range)

    def lend(self, fragments: Fragments) -> list[Registration]:
        """Register each fragment that is not registered yet; return it with give_back.

        Raises:
            BackendUnavailable: UCX refuses one.
        """
        lent: list[Registration] = []
        try:
            pairs = zip(
                fragments.addresses.tolist(), fragments.lengths.tolist(), strict=True
            )
            for place in pairs:
                found = self._by_range.get(place)
                if found is None:
                    found = Registration(self._context, *place, fragments.owner)
                    self._by_range[place] = found  # bounded: LANE_PAYLOADS_MAX
                found.users += 1
                self._spare.pop(place, None)
                lent.append(found)
        except BaseException:
            self.give_back(lent)
            raise
        return lent

    def give_back(self, lent: list[Registration]) -> None:
        """Release ranges that the peer has read; some unused ones stay registered."""
        for one in lent:
            one.users -= 1
            if not one.users:
                self._spare[one.address, one.nbytes] = None  # bounded: spare_max
        while len(self._spare) > self._spare_max:
            place = next(iter(self._spare))
            del self._spare[place]
            self._by_range.pop(place).close()

    def close(self) -> None:
        """Unregister all ranges; the lane must no longer touch memory."""
        for one in self._by_range.values():
            one.close()
        self._by_range.clear()
        self._spare.clear()
