"""Copies one payload into another in this process, without Python code per fragment.

Both payloads are cut at the borders of either, which gives pieces that are contiguous
on both sides; :mod:`kvwire.memory.pieces` copies the pieces.
"""

from __future__ import annotations

import mmap
from ctypes import addressof, c_char

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import distinct
from kvwire.kv.fragments import Array, Fragments, Payload
from kvwire.memory.pieces import HELD_BYTES, copy_pieces


def copy(source: Payload, destination: Payload) -> None:
    """Copy ``source`` into ``destination``, which must not overlap it.

    Args:
        source: The bytes to copy.
        destination: Memory of the same length.

    Raises:
        UsageError: They differ in length, or the destination is read-only.
    """
    if source.nbytes != destination.nbytes:
        raise UsageError(
            f"copy: {source.nbytes} bytes do not fit a destination of "
            f"{destination.nbytes}"
        )
    if isinstance(destination, Fragments):
        read_only = not destination.writable
    else:
        read_only = destination.readonly
    if read_only:
        raise UsageError("copy: the destination is read-only memory")
    if source.nbytes == 0:
        return
    if isinstance(source, memoryview) and isinstance(destination, memoryview):
        if source.nbytes <= HELD_BYTES:
            destination[:] = source
            return
        source = as_fragments(source)
    copy_pieces(*paired(source, destination), source.nbytes)


def as_fragments(payload: Payload) -> Fragments:
    """Return the payload as fragments; a view becomes a list of one."""
    if isinstance(payload, Fragments):
        return payload
    places = [address_of(payload)] if payload.nbytes else []
    starts = np.array([0, payload.nbytes][: len(places) + 1], np.uint64)
    return Fragments(
        np.array(places, np.uint64),
        starts[1:],
        owner=payload,
        writable=not payload.readonly,
        starts=starts,
    )


def address_of(buffer: bytes | bytearray | memoryview | mmap.mmap) -> int:
    """Return the address of a non-empty buffer; the caller keeps it alive."""
    if type(buffer) is memoryview and not buffer.readonly:
        return addressof(c_char.from_buffer(buffer))  # in a fifth of the time
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def paired(source: Payload, destination: Payload) -> tuple[Array, Array, Array]:
    """Cut both payloads at each other's borders; return both addresses and the lengths.

    At least one of them must be fragments.
    """
    # If one side is contiguous, only the other side's borders matter.
    if isinstance(source, memoryview):
        assert isinstance(destination, Fragments), "two views need no pieces"
        here = destination.starts[:-1] + np.uint64(address_of(source))
        return here, destination.addresses, destination.lengths
    here = _addresses(source)
    there = _addresses(destination)
    if there.size == 1 and isinstance(source, Fragments):
        return here, source.starts[:-1] + there, source.lengths
    assert isinstance(destination, Fragments), "two views need no pieces"
    if here.size == 1:
        return destination.starts[:-1] + here, there, destination.lengths
    assert isinstance(source, Fragments)
    borders = source.starts
    if not np.array_equal(borders, destination.starts):
        borders = distinct(np.concatenate((borders, destination.starts)))
    starts = borders[:-1]
    lengths = borders[1:] - borders[:-1]
    return _places(source, starts), _places(destination, starts), lengths


def _addresses(payload: Payload) -> Array:
    """Return the address of each fragment of a payload."""
    if isinstance(payload, Fragments):
        return payload.addresses
    return np.array((address_of(payload),), np.uint64)


def _places(payload: Fragments, offsets: Array) -> Array:
    """Return the memory addresses of the bytes at these offsets of a payload."""
    if offsets.size == payload.addresses.size:
        # no cut of the other side falls inside one of these fragments
        return payload.addresses
    index = np.searchsorted(payload.starts, offsets, "right") - 1
    return payload.addresses[index] + (offsets - payload.starts[index])
