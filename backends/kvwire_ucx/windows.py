"""Windows over UCX: the owner registers its memory once, and the reader gets blocks.

::

    owner                                        reader
      register the window's ranges
      description: a key for each --control link-->
                                                   gets of the bytes; all are over
                                                   gets of the generations; are over
                                                   generations are the ticket's: landed
      unregister              <--control link----  quiet

The owner takes no part, and never waits: a late reader finds other generations.

**Order.** The owner stores a new generation, passes a full fence, and only then writes
to the block. The reader requests the generations after UCX has reported all bytes. So
if one of its bytes was written later, the new generation was visible before its second
gets began:

* the owner's network card reads the memory for the second gets after the answers to the
  first gets have crossed the wire;
* within a host the kernel copies both for this thread, which executes a release and an
  acquire between them: loads before the release are not delayed beyond the acquire.

**Only with hardware or a kernel that reads on its own**: the kernel within a host
(cma), a network card between hosts. Over TCP and plain shared memory UCX emulates a get
with messages, and aborts the *owner's* process if such a message comes from an endpoint
that has failed (1.22, ``ucp_get_req_handler``). In these cases windows are read by
kvwire's own messages.

**The end of a read.** A get writes to the reader's memory, so a read has ended when UCX
has reported all of its gets, at the latest when the lane's worker is destroyed. Its
future waits for that, even if it fails.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import re
import struct
import threading
from typing import Final, final

import numpy as np

from kvwire.backend.gets import Gets, WindowRanges
from kvwire.backend.window import BlockRead, WindowMemory, WindowReader
from kvwire.errors import BackendUnavailable, ConnectionLost, MalformedFrame
from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Array
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire_ucx.binding import ERR_CANCELED, OK
from kvwire_ucx.pieces import RULE
from kvwire_ucx.registration import Registration
from kvwire_ucx.requests import UcxRanges
from kvwire_ucx.worker import UcxEndpoint, Worker

# Older versions emulate gets with messages even if cma is available: 1.17 did, and 1.19
# reads ranges of every size by cma.
VERSION_MIN: Final = (1, 19)
# The number of gets handed to UCX at once. Posting them takes less than a millisecond.
# Even on a fast network their bytes are still moving when the loop's next turn posts
# more gets.
PORTION: Final = 256
# UCX transports that read a peer's memory without its help: by the kernel within this
# host, by network cards between hosts.
_READING: Final = re.compile(r"(cma|knem|xpmem)(/|$)|(rc|dc|srd)(_|/|$)")
# UCX reads keys without knowing their length. With this padding, a malicious key ends
# in zeros: at most 64 domains of 255 bytes.
_PADDING: Final = bytes(64 * 256)
# UCX writes a key for each of its memory domains: 11 bytes with shared memory and TCP,
# some 30 bytes for each network card.
KEY_BYTES_MAX: Final = 1000
_KEY: Final = struct.Struct(">H")


@final
class UcxWindows:
    """The windows that a lane exposes to its peer, and the peer's that it reads.

    Args:
        worker: The lane's worker.
        endpoint: The endpoint to the peer.
    """

    def __init__(self, worker: Worker, endpoint: UcxEndpoint) -> None:
        self.worker = worker
        self.endpoint = endpoint
        self._exposed: dict[WindowMemory, tuple[bytes, list[Registration]]] = {}
        self._readers: set[UcxWindow] = set()

    @functools.cached_property
    def _transports(self) -> tuple[str, ...]:
        return self.endpoint.transports

    def expose(self, memory: WindowMemory) -> bytes:
        """Register a window's memory; return the keys with which the peer reads it.

        Raises:
            BackendUnavailable: No transport here reads on its own, UCX refuses to
                register the memory, or it consists of too many pieces.
        """
        self._require_reading()
        if memory not in self._exposed:
            places = WindowRanges(memory).places
            registered: list[Registration] = []
            try:
                for address, nbytes in places:
                    one = Registration(self.worker.context, address, nbytes)
                    registered.append(one)  # bounded: the window's tensors
                description = describe_keys([one.key for one in registered])
            except BaseException:
                _unregister(registered)
                raise
            self._exposed[memory] = (description, registered)
        return self._exposed[memory][0]

    def conceal(self, memory: WindowMemory) -> None:
        """Unregister a window's memory, which invalidates its keys."""
        if memory in self._exposed:
            _, registered = self._exposed.pop(memory)
            _unregister(registered)

    def window(self, description: bytes, memory: WindowMemory) -> UcxWindow:
        """Return a reader of a window of the peer.

        Raises:
            BackendUnavailable: No transport here reads on its own, or a key is invalid.
            MalformedFrame: A correct lane would not make such a description.
        """
        self._require_reading()
        try:
            ranges = WindowRanges(memory)
        except ValueError as exc:
            raise MalformedFrame(RULE, f"ucx: a window with {exc}") from None
        keys = self._unpack(read_keys(description, len(ranges.places)))
        reader = UcxWindow(self, ranges, keys)
        self._readers.add(reader)  # bounded: the windows of a connection
        return reader

    def leave(self, reader: UcxWindow) -> None:
        """Forget a closed reader that has no read in flight."""
        self._readers.discard(reader)
        self._destroy(reader.keys.tolist())

    def end_readers(self) -> None:
        """End the readers, because the lane ends; posted gets continue."""
        for reader in list(self._readers):
            reader.close()

    def unregister(self) -> None:
        """Unregister all windows, after the worker was destroyed."""
        for memory in list(self._exposed):
            self.conceal(memory)

    def _destroy(self, keys: list[int]) -> None:
        """Free keys; a destroyed worker has already freed its own."""
        if not self.worker.closed:
            for key in keys:
                self.worker.context.library.ucp.rkey_destroy(key)

    def _require_reading(self) -> None:
        if not any(map(_READING.match, self._transports)):
            raise BackendUnavailable(
                "ucx: windows need a network card or cma, which read the peer's "
                f"memory without its help; UCX uses {', '.join(self._transports)}"
            )

    def _unpack(self, packed: list[bytes]) -> list[int]:
        ucp = self.worker.context.library.ucp
        keys: list[int] = []
        for key in packed:
            handle = ctypes.c_void_p()
            status = ucp.ep_rkey_unpack(
                self.endpoint.handle, key + _PADDING, ctypes.byref(handle)
            )
            if status != OK:
                self._destroy(keys)
                text = self.worker.context.library.status_text(status)
                raise BackendUnavailable(f"ucx: the peer's key cannot be used: {text}")
            keys.append(handle.value or 0)  # bounded: DESCRIPTOR_BYTES_MAX
        return keys


@final
class UcxWindow(WindowReader):
    """Reads one window of the peer."""

    way = "ucx"
    immediate = False

    def __init__(
        self, windows: UcxWindows, ranges: WindowRanges, keys: list[int]
    ) -> None:
        self.windows = windows
        self.ranges = ranges
        self.keys: Array = np.array(keys, np.uint64)
        self.closed = False
        self._reads = 0
        self._between = threading.Lock()
        self._between.acquire()

    def read(self, batch: BlockRead) -> asyncio.Future[Bits]:
        if self.closed or not self.windows.endpoint.handle:
            raise ConnectionLost("ucx: the lane of this window has ended")
        self._reads += 1
        return _Read(self, batch).future

    @property
    def busy(self) -> bool:
        return self._reads > 0

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if not self._reads:
                self.windows.leave(self)

    def pass_fence(self) -> None:
        """Order loads before this call before loads after it; see the module."""
        self._between.release()
        self._between.acquire()

    def over(self) -> None:
        """Record that a read has ended."""
        self._reads -= 1
        if self.closed and not self._reads:
            self.windows.leave(self)


@final
class _Read:
    """One batch: gets of its bytes in portions, then gets of its generations."""

    __slots__ = ("_batch", "_gets", "_good", "_looks", "_next", "_window", "future")

    def __init__(self, window: UcxWindow, batch: BlockRead) -> None:
        self._window = window
        self._batch = batch
        self._gets, self._good = window.ranges.gets(batch)
        self._looks = window.ranges.looks(batch.entries[self._good])
        self._next = 0
        self.future: asyncio.Future[Bits] = asyncio.get_running_loop().create_future()
        self._post(self._gets)

    def _post(self, gets: Gets) -> None:
        """Post the next portion, which may be empty."""
        part = slice(self._next, self._next + PORTION)
        self._next += PORTION
        windows = self._window.windows
        windows.worker.get(
            windows.endpoint.handle,
            UcxRanges(
                gets.here[part],
                gets.lengths[part],
                gets.there[part],
                self._window.keys[gets.ranges[part]],
            ),
            self._over,
            (self._batch, self._looks.memory),
        )

    def _over(self, status: int, _nbytes: int) -> None:
        """Continue when a portion has ended."""
        if status != OK:
            self._end(status)
        elif self._next < len(self._gets):
            self._continue(self._gets)
        elif self._gets is not self._looks.gets:
            self._window.pass_fence()
            self._gets = self._looks.gets
            self._next = 0
            self._continue(self._gets)
        else:
            self._end(OK)

    def _continue(self, gets: Gets) -> None:
        if self._window.closed or not self._window.windows.endpoint.handle:
            self._end(ERR_CANCELED)
        else:
            self._post(gets)

    def _end(self, status: int) -> None:
        """Resolve the future, since UCX touches no memory of this read any more."""
        window = self._window
        future = self.future
        if status == OK:
            landed = np.zeros(self._good.size, np.bool_)
            seen = self._looks.memory[self._looks.places]
            landed[self._good] = seen == self._batch.generations[self._good]
            if not future.done():
                future.set_result(landed)
        elif not future.done():
            text = window.windows.worker.context.library.status_text(status)
            future.set_exception(
                ConnectionLost(f"ucx: the window can no longer be read: {text}")
            )
        window.over()


def _unregister(registered: list[Registration]) -> None:
    for one in registered:
        one.close()


def describe_keys(keys: list[bytes]) -> bytes:
    """Return the keys as one description.

    Raises:
        BackendUnavailable: It would be too long.
    """
    description = b"".join(part for key in keys for part in (_KEY.pack(len(key)), key))
    if len(description) > DESCRIPTOR_BYTES_MAX or max(map(len, keys)) > KEY_BYTES_MAX:
        raise BackendUnavailable(
            f"ucx: a window in {len(keys)} pieces of memory needs keys of "
            f"{len(description)} bytes, but a description has at most "
            f"{DESCRIPTOR_BYTES_MAX}; allocate its tensors in one piece"
        )
    return description


def read_keys(description: bytes, count: int) -> list[bytes]:
    """Read a description with this number of keys.

    Raises:
        MalformedFrame: A correct lane would not make it.
    """
    keys: list[bytes] = []
    at = 0
    while at < len(description) and len(keys) < count:
        (nbytes,) = _KEY.unpack_from(description.ljust(at + _KEY.size, b"\0"), at)
        at += _KEY.size
        key = description[at : at + nbytes]
        at += nbytes
        if not 0 < nbytes == len(key) <= KEY_BYTES_MAX:
            raise MalformedFrame(RULE, f"ucx: a window's key of {nbytes} bytes")
        keys.append(key)  # bounded: count
    if len(keys) != count or at != len(description):
        raise MalformedFrame(
            RULE,
            f"ucx: expected {count} keys, one for each piece of the window, in "
            f"exactly {len(description)} bytes; found {len(keys)} in {at}",
        )
    return keys
