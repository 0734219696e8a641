"""A stage of transfers with ``codec=``: links move an encoded copy, the shadow.

The two ends move the shadow, in encoded rows (:mod:`kvwire.kv.coded_cache`), as they
move any memory. The differences are::

    producer   ready -> encoded on a thread -> marked -> sent
    consumer   landed in the shadow -> decoded on a thread -> landed

A thread that encodes reads the caller's blocks, and one that decodes writes them. So a
producer's memory has not drained before its last thread has returned, and a consumer
has no outcome before that: no outcome names a block as landed that is not in its cache.
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
from kvwire.kv.codecs.rows import row_codec
from kvwire.kv.coded_cache import CodedCache, Move
from kvwire.kv.fragments import Fragments
from kvwire.kv.landed import Landed
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import Segment, TransferPlan
from kvwire.memory.copy import as_fragments, copy
from kvwire.memory.device.device_copies import DeviceFailed
from kvwire.transfers.event_wait import Failure
from kvwire.transfers.ready_log import ReadyRange

if TYPE_CHECKING:
    from kvwire.driver.codec_threads import CodecThreads


class _Stage:
    """The parts that encoding and decoding share.

    Attributes:
        memory: The cache that links touch: the shadow.
        lists: The positions of the listed blocks in it.
    """

    def __init__(
        self, threads: CodecThreads, cache: PagedCache, lists: BlockLists, codec: object
    ) -> None:
        self._threads = threads
        self._cache = cache
        self._coded = CodedCache(cache, lists, row_codec(codec))
        self.memory: PagedCache = self._coded.cache
        self.lists: BlockLists = self._coded.lists
        self._move()  # that a device does not work is known now

    def _move(self) -> Move:
        """Return the copy function between cache and host memory, for threads.

        The copy starts after the work that the calling thread has queued on its stream
        of the device.
        """
        if self._cache.device is None:
            return copy
        devices = self._threads.devices
        after = devices.prepare(self._cache.device, None)

        def move(source: Fragments | memoryview, into: Fragments | memoryview) -> None:
            ends = as_fragments(source), as_fragments(into)
            if any(end.device is not None for end in ends):
                devices.copy(*ends, after)
            else:
                copy(*ends)

        return move


class Encoding(_Stage):
    """Encodes each marked part before it is sent; thread-safe."""

    _jobs = 0  # that read the caller's blocks
    _stopped = False  # no other job begins
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

        def job() -> None:
            self._coded.encode(mark.group, mark.layers, mark.blocks, self._move())

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
            return  # it proves nothing any more: the job counts as one that reads
        with self._lock:
            self._jobs -= 1
            drained = None if self._jobs else self._drained
        if drained is not None:
            drained.set_result(None)


class Decoding(_Stage):
    """Decodes each landed part; belongs to the loop.

    Args:
        then: Called by the loop for each piece, with None or the error.

    Attributes:
        jobs: The number of pieces that threads have not finished.
        stopped: Pieces that no thread has started are skipped.
    """

    jobs: int = 0
    stopped: bool = False
    _plan: TransferPlan
    # What was begun with, and what is decoded.
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
                continue  # nothing but what was here before
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
        move = self._move()
        wanted = self._plan.maps[piece.group].wanted
        self._coded.decode(walk, piece.layer_range, piece.granule_slice, wanted, move)

    def _over(self, piece: Segment, error: Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._note, piece, error)

    def _note(self, piece: Segment, error: Exception | None) -> None:
        self.jobs -= 1
        if error is None:
            self._decoded.mark(piece)
        self._then(error)
