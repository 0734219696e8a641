"""The codec stage of transfers: links move an encoded copy, the shadow.

The shadow has encoded rows (:mod:`kvwire.kv.coded_cache`), and the two ends move it
like any memory. The differences are::

    producer   ready -> encoded on a thread -> marked -> sent
    consumer   landed in the shadow -> decoded on a thread -> landed

Encoding threads read the caller's blocks, and decoding threads write to them. So a
producer's memory does not drain before its last thread has returned. A consumer has no
outcome before then, so that every landed block in the outcome is in the cache.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import RequestCancelled
from kvwire.kv.blocks import BlockLists
from kvwire.kv.coded_cache import CodedCache, Move
from kvwire.kv.fragments import Fragments
from kvwire.kv.landed import Landed
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import Segment, TransferPlan
from kvwire.kv.row_codec import row_codec
from kvwire.memory.copy import as_fragments, copy
from kvwire.memory.device.device_copies import DeviceCopies, DeviceFailed
from kvwire.transfers.event_wait import Failure
from kvwire.transfers.ready_log import ReadyRange

if TYPE_CHECKING:
    from kvwire.driver.codec_threads import CodecThreads


class _Stage:
    """The parts that encoding and decoding share.

    Attributes:
        memory: The shadow, which is the cache that links touch.
        lists: The positions of the listed blocks in the shadow.
    """

    def __init__(
        self, threads: CodecThreads, cache: PagedCache, lists: BlockLists, codec: object
    ) -> None:
        self._threads = threads
        self._coded = CodedCache(cache, lists, row_codec(codec))
        self.memory: PagedCache = self._coded.cache
        self.lists: BlockLists = self._coded.lists
        # How threads copy between the cache and host memory: at once, since whatever
        # a part has to wait for has fired by then.
        self._move: Move = copy
        if cache.device is not None:
            threads.devices.open(cache.device)
            self._move = partial(_move_device, threads.devices)


class Encoding(_Stage):
    """Encodes each marked part before it is sent; thread-safe."""

    _jobs = 0  # jobs that read the caller's blocks
    _stopped = False  # no more jobs begin
    _drained: Future[None] | None = None

    def __init__(
        self, threads: CodecThreads, cache: PagedCache, lists: BlockLists, codec: object
    ) -> None:
        super().__init__(threads, cache, lists, codec)
        self._lock = threading.Lock()

    def encode(self, mark: ReadyRange, then: Callable[[Failure], None]) -> None:
        """Start to encode a part; ``then`` is called once, from any thread."""
        with self._lock:
            if self._stopped:
                return
            self._jobs += 1
        encode = self._coded.encode
        job = partial(encode, mark.group, mark.layers, mark.blocks, self._move)
        self._threads.run(job, partial(self._encoded, then))

    def stop(self) -> Future[None] | None:
        """Start no more jobs; return a future for the end of the running ones.

        Returns None if none is running. Once the future is done, no thread reads the
        blocks.
        """
        with self._lock:
            self._stopped = True
            if not self._jobs:
                return None
            self._drained = Future()
            return self._drained

    def _encoded(
        self, then: Callable[[Failure], None], error: Exception | None
    ) -> None:
        then("" if error is None else f"could not be encoded: {error}")
        if isinstance(error, DeviceFailed):
            return  # nothing shows that the job has stopped, so it counts as reading
        with self._lock:
            self._jobs -= 1
            if self._jobs:
                return
            # A future keeps its callbacks, so one that stayed here would keep what
            # waits for it, which has this object.
            drained = self._drained
            self._drained = None
        if drained is not None:
            drained.set_result(None)


class Decoding(_Stage):
    """Decodes each landed part; belongs to the loop.

    Args:
        then: Called on the loop for each piece, with None or the error.

    Attributes:
        jobs: The number of pieces that threads have not finished.
        stopped: Whether pieces that no thread has started are skipped.
    """

    jobs: int = 0
    stopped: bool = False
    _plan: TransferPlan
    # The pieces that were started, and the decoded ones.
    _begun: Landed
    _decoded: Landed

    def __init__(
        self,
        threads: CodecThreads,
        cache: PagedCache,
        lists: BlockLists,
        codec: object,
        loop: asyncio.AbstractEventLoop,
        then: Callable[[Exception | None], None],
    ) -> None:
        super().__init__(threads, cache, lists, codec)
        self._loop = loop
        self._then = then

    def begin(self, plan: TransferPlan) -> Landed:
        """Return the record of decoded parts; at first the blocks held before."""
        self._plan = plan
        self._begun = Landed(plan)
        self._decoded = Landed(plan)
        return self._decoded

    def begin_with(self, segment: Segment) -> None:
        """Start to decode a segment by layers, except for parts already started."""
        if self.stopped:
            return
        for part in self._begun.lacking(segment):
            if self._begun.has(part):
                continue  # only parts that were here before
            self._begun.mark(part)
            for layer in part.layer_range:
                piece = Segment(part.group, layer, 1, part.granule, part.granules)
                self.jobs += 1
                self._threads.run(
                    partial(self._decode, piece),
                    partial(self._over, piece),
                )

    def _decode(self, piece: Segment) -> None:
        if self.stopped:
            raise RequestCancelled("the transfer was ended before it was decoded")
        walk = self._plan.groups[piece.group]
        wanted = self._plan.maps[piece.group].wanted
        self._coded.decode(
            walk, piece.layer_range, piece.granule_slice, wanted, self._move
        )

    def _over(self, piece: Segment, error: Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: no waiter is left
            self._loop.call_soon_threadsafe(self._note, piece, error)

    def _note(self, piece: Segment, error: Exception | None) -> None:
        self.jobs -= 1
        if error is None:
            self._decoded.mark(piece)
        self._then(error)


def _move_device(
    devices: DeviceCopies,
    source: Fragments | memoryview,
    into: Fragments | memoryview,
) -> None:
    ends = as_fragments(source), as_fragments(into)
    if any(end.device is not None for end in ends):
        devices.copy(*ends)
    else:
        copy(*ends)
