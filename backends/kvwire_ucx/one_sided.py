"""One-sided lanes: the sender lends memory, and the receiver reads it in place.

::

    sender                                       receiver
      register exact ranges
      descriptor: addresses and keys --control link-->
                                                   get, straight into its destination
               <------- receipt, 1 byte, tagged -- all gets are over
      unregister; payload_sent                     payload_received

Neither side writes to the other's memory. A get writes to the reader's own memory,
through its own worker, and is quiet when that is destroyed. The sender's memory is
quiet when the receipt or the peer's bye has come, or when its keys are invalid. Invalid
keys end every kind of reading but one: a process of this host can read another's memory
without its help (cma). Then only the peer's receipt or bye counts, or its death; see
:attr:`OneSidedPayloads.must_wait`. The same holds for messages of such a lane, since
UCX may make the peer read those in the same way.

Lanes lend only if a network card or the kernel does the reading. Over TCP and plain
shared memory UCX emulates a get with messages, and ends the *lender's* process when
such a message comes from an endpoint that has failed (1.22, ``ucp_get_req_handler``).
There payloads are sent as messages.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Final, final

from kvwire.backend import Payload
from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB
from kvwire.memory.copy import as_fragments, copy
from kvwire_ucx.binding import OK
from kvwire_ucx.bootstrap import RECEIPT, UcxBootstrap
from kvwire_ucx.pieces import PIECES_MAX, LentFragment, lent_descriptor
from kvwire_ucx.registration import Registration, Registrations
from kvwire_ucx.requests import MemoryHandles
from kvwire_ucx.worker import UcxEndpoint, Worker

_log = logging.getLogger("kvwire.ucx")

_UNNOTICED: Final = "ucx: it will not be noticed if the peer dies: %s"
# With fewer bytes on average, UCX packs the fragments into a message.
LENT_BYTES_MIN: Final = 128 * KIB
# The most gets per payload. If the destination is cut into more pieces, the payload is
# read into one buffer and scattered from there, in one call.
GETS_MAX: Final = 2 * PIECES_MAX
# Transports of UCX that read a peer's memory without its help: the kernel within this
# host, network cards elsewhere.
_KERNEL: Final = re.compile(r"(cma|knem|xpmem)(/|$)")
_MEMORY: Final = re.compile(r"(cma|knem|xpmem|sysv|posix|self)(/|$)")
_CARD: Final = re.compile(r"(rc|dc|srd)(_|/|$)")
# UCX reads keys without knowing their length. A malicious one then ends in zeros: at
# most 64 domains of 255 bytes.
_PADDING: Final = bytes(64 * 256)

# Called with the status when the operations of a payload are over.
OnRead = Callable[[int], None]


@final
class OneSidedPayloads:
    """Lends one lane's payloads to the peer, and reads payloads that the peer lends."""

    def __init__(
        self,
        worker: Worker,
        own: UcxBootstrap,
        peer: UcxBootstrap,
        endpoint: UcxEndpoint,
    ) -> None:
        self._worker = worker
        self._own = own
        self._peer = peer
        self._endpoint = endpoint
        context = worker.context
        self._ranges = Registrations(context, context.settings.registrations)
        self._process: int | None = None
        # One byte serves all receipts, since only their arrival matters.
        self._receipt = MemoryHandles(memoryview(bytearray(1)))

    @functools.cached_property
    def _transports(self) -> tuple[str, ...]:
        return self._endpoint.transports

    @functools.cached_property
    def reads(self) -> bool:
        """Return whether a card or the kernel can read here, once the lane is up."""
        return any(_KERNEL.match(one) or _CARD.match(one) for one in self._transports)

    @property
    def must_wait(self) -> bool:
        """Return whether the peer can read payloads even after this side has ended."""
        return any(map(_KERNEL.match, self._transports))

    @property
    def in_memory(self) -> bool:
        """Return whether payload passes through memory only, never through a wire."""
        return self.reads and all(map(_MEMORY.match, self._transports))

    def when_reader_dies(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the peer's process, which is on this host, has ended.

        UCX does not report that: it watches peers whose endpoints it knows, and a peer
        that only reads has none.
        """
        loop = asyncio.get_running_loop()
        peer = self._peer
        if not peer.pid_namespace or peer.pid_namespace != self._own.pid_namespace:
            _log.warning(_UNNOTICED, "its process id is of another namespace")
            return
        try:
            process = self._process = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            call()
        # An old kernel, a Python built for one (such as conda's), or an invalid process
        # id.
        except (OSError, AttributeError, OverflowError) as exc:
            _log.warning(_UNNOTICED, exc)
        else:

            def died() -> None:
                loop.remove_reader(process)
                call()

            loop.add_reader(process, died)

    def lend(self, payload: Payload, number: int, on_read: OnRead) -> bytes | None:
        """Lend a payload; return the descriptor by which the peer reads it.

        Args:
            payload: Lent until ``on_read``.
            number: The number of the message that it replaces.
            on_read: Called when the peer has read it, or never will.

        Returns:
            None if the payload must be sent instead: nothing can read it, its fragments
            are small or too many, or UCX refuses to register them.
        """
        if not self.reads:
            return None
        fragments = as_fragments(payload).merged()
        count = len(fragments)
        if not 1 <= count <= PIECES_MAX or fragments.nbytes < LENT_BYTES_MIN * count:
            return None
        try:
            lent = self._ranges.lend(fragments)
        except BackendUnavailable:
            return None
        descriptor = lent_descriptor(
            number, [LentFragment(one.address, one.nbytes, one.key) for one in lent]
        )
        if descriptor is None:
            self._ranges.give_back(lent)
        else:
            self._await_receipt(lent, payload, number, on_read)
        return descriptor

    def _await_receipt(
        self, lent: list[Registration], payload: Payload, number: int, on_read: OnRead
    ) -> None:
        def done(status: int, _nbytes: int) -> None:
            if status == OK:
                self._ranges.give_back(lent)
                assert payload is not None  # it has been kept alive until here
            on_read(status)

        self._worker.receive(self._receipt, self._own.tag(number | RECEIPT), done)

    def read(
        self, number: int, lent: list[LentFragment], payload: Payload, on_read: OnRead
    ) -> None:
        """Read a lent payload into our memory.

        Raises:
            BackendUnavailable: Nothing here can read it, or a key is invalid.
        """
        if not self.reads:
            raise BackendUnavailable(
                f"ucx: the peer lends memory, and nothing here reads it: UCX uses "
                f"{', '.join(self._transports)}; kvwire doctor says why there is no "
                f'cma, or set one_sided="no"'
            )
        target = as_fragments(payload).merged()
        scattered = len(target) + len(lent) > GETS_MAX
        into = target
        if scattered:
            into = as_fragments(memoryview(bytearray(target.nbytes)))
        gets = list(_meet(lent, into))
        keys = self._unpack(lent)
        left = len(gets)
        worst = OK

        def done(status: int, _nbytes: int) -> None:
            nonlocal left, worst
            left -= 1
            worst = worst or status
            if left:
                return
            self._destroy(keys)
            if worst == OK and scattered:
                copy(into, target)
            on_read(worst)

        for which, remote, local, nbytes in gets:
            self._get(local, nbytes, remote, keys[which], (payload, into), done)

    def say_read(self, number: int) -> None:
        """Send the peer a receipt for a payload."""
        tag = self._peer.tag(number | RECEIPT)
        handle = self._endpoint.handle
        self._worker.send(handle, self._receipt, tag, lambda *_: None, eager=True)

    def close(self) -> None:
        """Unregister all ranges. The worker must be destroyed, so nobody reads them."""
        self._ranges.close()
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process)
            os.close(self._process)
            self._process = None

    def _get(
        self,
        local: int,
        nbytes: int,
        remote: int,
        key: int,
        keeps: object,
        on_done: Callable[[int, int], None],
    ) -> None:
        ucp = self._worker.context.library.ucp
        endpoint = self._endpoint.handle
        self._worker.post(
            on_done,
            keeps,
            lambda params: ucp.get_nbx(endpoint, local, nbytes, remote, key, params),
        )

    def _unpack(self, lent: list[LentFragment]) -> list[int]:
        ucp = self._worker.context.library.ucp
        keys: list[int] = []
        for one in lent:
            handle = ctypes.c_void_p()
            status = ucp.ep_rkey_unpack(
                self._endpoint.handle, one.key + _PADDING, ctypes.byref(handle)
            )
            if status != OK:
                self._destroy(keys)
                text = self._worker.context.library.status_text(status)
                raise BackendUnavailable(f"ucx: the peer's key is of no use: {text}")
            keys.append(handle.value or 0)  # bounded: PIECES_MAX
        return keys

    def _destroy(self, keys: list[int]) -> None:
        if not self._worker.closed:  # otherwise they went with it
            for key in keys:
                self._worker.context.library.ucp.rkey_destroy(key)


def _meet(
    lent: list[LentFragment], into: Fragments
) -> Iterator[tuple[int, int, int, int]]:
    """Cut both lists at each other's borders: fragment, address there, here, bytes."""
    places = zip(into.addresses.tolist(), into.lengths.tolist(), strict=True)
    here = room = 0
    for which, one in enumerate(lent):
        there = one.address
        left = one.nbytes
        while left:
            if not room:
                here, room = next(places)
            nbytes = min(left, room)
            yield which, there, here, nbytes
            there = there + nbytes
            left = left - nbytes
            here = here + nbytes
            room = room - nbytes
