"""Memory that the peer may read: registered with UCX as exact ranges, with their keys.

A key is good for reading one range. Where a network card reads, it is good until the
range is unregistered, so that happens as soon as the payload has been read or the lane
has ended. A few ranges may be kept for caches that live long; see ``registrations`` in
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
    """Owns the right to read one range, until it is closed."""

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
        """Unregister it: no key leads there any more."""
        handle, self._handle = self._handle, 0
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
        packed, length = ctypes.c_void_p(), ctypes.c_size_t()
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
    """Holds the ranges of one lane that are registered."""

    def __init__(self, context: Context, spare_max: int) -> None:
        self._context = context
        self._spare_max = spare_max
        self._by_range: dict[tuple[int, int], Registration] = {}
        # Those of no payload, the one that was used last at the end.
        self._spare: dict[tuple[int, int], None] = {}

    def __len__(self) -> int:
        """Return how many there are, spare ones included."""
        return len(self._by_range)

    def lend(self, fragments: Fragments) -> list[Registration]:
        """Register each fragment, or find it registered; give them back later."""
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
        """Take ranges back that the peer has read."""
        for one in lent:
            one.users -= 1
            if not one.users:
                self._spare[one.address, one.nbytes] = None  # bounded: spare_max
        while len(self._spare) > self._spare_max:
            place = next(iter(self._spare))
            del self._spare[place]
            self._by_range.pop(place).close()

    def close(self) -> None:
        """Unregister all, read or not; the lane touches no memory any more."""
        for one in self._by_range.values():
            one.close()
        self._by_range.clear()
        self._spare.clear()
