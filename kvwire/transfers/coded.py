"""Transfers with ``codec=``: what moves is a shadow of the blocks, in encoded rows.

The two ends are those of any transfer, on the shadow's memory
(:mod:`kvwire.kv.coded_cache`). What is different::

    producer   ready -> encoded on a thread -> marked -> sent
    consumer   landed in the shadow -> decoded on a thread -> landed

A thread that encodes reads the caller's blocks, and one that decodes writes them. So a
producer's memory has not drained before its last thread has returned, and a consumer
has no outcome before that: no outcome names a block as landed that is not in its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import BackendUnavailable, KVWireError, RequestCancelled, WireCode
from kvwire.kv.blocks import BlockLists
from kvwire.kv.codecs.rows import row_codec
from kvwire.kv.coded_cache import CodedCache, Move
from kvwire.kv.fragments import Fragments
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import Outcome
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import Segment
from kvwire.limits import LANDED_BOXES_MAX
from kvwire.memory.copy import as_fragments, copy
from kvwire.memory.device.device_copies import DeviceFailed
from kvwire.proto.records import SegmentRecord
from kvwire.transfers.base import Attempt
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.event_wait import Failure
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.options import ReceiveOptions, SendOptions
from kvwire.transfers.outgoing import OutgoingState
from kvwire.transfers.ready_log import Encoder, ReadyRange
from kvwire.transfers.state import OVER

if TYPE_CHECKING:
    from kvwire.driver.codec_threads import CodecThreads


def outgoing_kind(options: SendOptions) -> type[OutgoingState]:
    """Return the class of the producer's end of a transfer."""
    return OutgoingState if options.get("codec") is None else CodedOutgoing


def incoming_kind(options: ReceiveOptions) -> type[IncomingState]:
    """Return the class of the consumer's end of a transfer."""
    return IncomingState if options.get("codec") is None else CodedIncoming


class CodedOutgoing(OutgoingState):
    """Encodes what is marked ready, and sends it after that."""

    # Jobs that read the caller's blocks; no other begins once it has stopped.
    _jobs = 0
    _stopped = False

    def choose_memory(self, codec: object) -> tuple[PagedCache, BlockLists]:
        self._lock = threading.Lock()
        self._threads = self.communicator.codec_threads
        self._coded = CodedCache(self.cache, self.lists, row_codec(codec))
        _move(self._threads, self.cache)  # a device that does not work is known now
        return self._coded.cache, self._coded.lists

    def encoder(self) -> Encoder:
        return self._encode

    def record(self, outcome: Outcome, attempts: Iterable[Attempt]) -> None:
        """Record the outcome; jobs that still read blocks keep them from draining."""
        with self._lock:
            self._stopped = True
            self._busy += bool(self._jobs)
        super().record(outcome, attempts)

    def _encode(self, mark: ReadyRange, then: Callable[[Failure], None]) -> None:
        with self._lock:
            if self._stopped:
                return
            self._jobs += 1

        def job() -> None:
            move = _move(self._threads, self.cache)
            self._coded.encode(mark.group, mark.layers, mark.blocks, move)

        self._threads.run(job, partial(self._encoded, then))

    def _encoded(
        self, then: Callable[[Failure], None], error: Exception | None
    ) -> None:
        then("" if error is None else f"could not be encoded: {error}")
        if isinstance(error, DeviceFailed):
            return  # it proves nothing any more: the job counts as one that reads
        with self._lock:
            self._jobs -= 1
            drained = self._stopped and not self._jobs
        if drained:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self.loop.call_soon_threadsafe(self._one_free)


class CodedIncoming(IncomingState):
    """Decodes what has landed, and counts it as landed after that."""

    # What jobs have begun with, and what they are through with.
    _begun: Landed | None = None
    _decoded: Landed | None = None
    _jobs = 0
    # It was ended from here: jobs that have not begun are left out.
    _stopped = False
    # Why it ends, while jobs are not through.
    _cause: KVWireError | None = None

    def choose_memory(self, codec: object) -> tuple[PagedCache, BlockLists]:
        self._threads = self.communicator.codec_threads
        self._coded = CodedCache(self.cache, self.lists, row_codec(codec))
        _move(self._threads, self.cache)  # a device that does not work is known now
        return self._coded.cache, self._coded.lists

    def stop(self, error: KVWireError, code: WireCode) -> None:
        """End the transfer, unless it ends already."""
        if self.state not in OVER:
            self._stopped = True
            super().stop(error, code)

    def plan_with(self, description: TransferOffer) -> None:
        super().plan_with(description)
        if self._begun is None:
            self._begun, self._decoded = Landed(self.plan), Landed(self.plan)
            self._readable = self._decoded

    def segment_landed(self, core: SegmentRecord, segment: Segment) -> None:
        super().segment_landed(core, segment)
        if not core.damaged:
            self._decode(segment)

    def attempt_ended(self, error: KVWireError | None) -> None:
        """Take in the end of an attempt; parts that landed do not come again."""
        self._decode_landed()
        super().attempt_ended(error)

    def end_now(self, cause: KVWireError) -> None:
        """End the transfer; the outcome waits for what is being decoded."""
        self._decode_landed()
        if self._jobs:
            self._cause = cause
            return
        if self._decoded is not None:
            self.landed = self._decoded
        super().end_now(cause)

    # --- inside -----------------------------------------------------------------------

    def _decode_landed(self) -> None:
        """Begin with all that has landed and was not begun with."""
        if self._begun is not None and not self._stopped:
            for segment in self.landed.boxes(LANDED_BOXES_MAX):
                self._decode(segment)

    def _decode(self, segment: Segment) -> None:
        assert self._begun is not None
        for part in self._begun.lacking(segment):
            if self._begun.has(part):
                continue  # nothing but what was here before
            self._begun.mark(part)
            for layer in part.layer_range:
                piece = Segment(part.group, layer, 1, part.granule, part.granules)
                self._jobs += 1
                self._threads.run(
                    partial(self._decode_piece, piece),
                    partial(self._piece_over, piece),
                )

    def _decode_piece(self, piece: Segment) -> None:
        if self._stopped:
            raise RequestCancelled("the transfer was ended before it was decoded")
        walk, move = self.plan.groups[piece.group], _move(self._threads, self.cache)
        wanted = self.plan.maps[piece.group].wanted
        self._coded.decode(walk, piece.layer_range, piece.granule_slice, wanted, move)

    def _piece_over(self, piece: Segment, error: Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self._note_piece, piece, error)

    def _note_piece(self, piece: Segment, error: Exception | None) -> None:
        assert self._decoded is not None
        self._jobs -= 1
        if error is None:
            self._decoded.mark(piece)
            self._open_gates()
        elif not isinstance(error, RequestCancelled):
            self._busy += isinstance(error, DeviceFailed)  # and may write for good
            wrong = BackendUnavailable(f"what has landed was not decoded: {error}")
            self._cause = self._cause and wrong
            self.stop(wrong, WireCode.OTHER)
        if self._cause is not None and not self._jobs:
            self._try_to_end(self._cause)


def _move(threads: CodecThreads, cache: PagedCache) -> Move:
    """Return what copies between a cache and host memory, on a thread.

    What the calling thread has queued on its stream of the cache's device comes first.
    """
    if cache.device is None:
        return copy
    after = threads.devices.prepare(cache.device, None)

    def move(source: Fragments | memoryview, into: Fragments | memoryview) -> None:
        ends = as_fragments(source), as_fragments(into)
        if any(end.device is not None for end in ends):
            threads.devices.copy(*ends, after)
        else:
            copy(*ends)

    return move
