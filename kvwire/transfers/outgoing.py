"""The producer's end of a KV transfer: marks go in, segments go out.

One transfer may serve several consumers, such as the ranks of a tensor-parallel group.
Each consumer has its own leg and plan. All legs read the same log of marks, and on each
link a flow turns marks into segments. A small layer is sent at once if nothing is under
way; otherwise it waits to be joined with its neighbours, like small packets in Nagle's
algorithm. Large marks are divided.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from kvwire.aio import FORKED
from kvwire.errors import (
    KVWireError,
    PeerCancelled,
    ProfileMismatch,
    RequestCancelled,
    UsageError,
    WireCode,
    shown,
)
from kvwire.kv.blocks import Bits, BlockLists, Blocks
from kvwire.kv.geometry import Geometry
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import Segment, TransferPlan
from kvwire.limits import (
    GROUP_BYTES,
    SEGMENT_BYTES,
    SEGMENTS_MAX,
    SEGMENTS_TOGETHER,
    WAKEUP_BYTES,
)
from kvwire.proto.events import SegmentsAcknowledged
from kvwire.transfers.codec import Encoding
from kvwire.transfers.dedup import digest, listed_hashes
from kvwire.transfers.leg import UNMARKED, Leg, TransferEvent
from kvwire.transfers.offer import TransferOffer
from kvwire.transfers.options import SendOptions, grown_lists
from kvwire.transfers.ports import SharedServices
from kvwire.transfers.ready_log import ReadyLog, ReadyRange, Which
from kvwire.transfers.state import OFF_LINK, ON_LINK, LegInput, LegState
from kvwire.transfers.transfer import NextMove, Progress, Transfer

# Bytes of one transfer that are queued on a link at once: looking up their fragments
# blocks the loop on either side for half a millisecond. More would not keep the wire
# busier.
AHEAD_BYTES: Final = 4 * SEGMENT_BYTES


class Outgoing(Transfer):
    """Sends a transfer as its producer. Created by ``publish`` and ``push``.

    Await it for its :class:`~kvwire.Outcome`: a partial or failed transfer is an
    outcome and not an exception. ``async with out:`` finishes at the end of the block,
    and aborts if an exception leaves the block. Call all methods on the communicator's
    loop, except those marked as thread-safe.
    """

    # Encodes marked parts before they are sent; None without a codec.
    _encoding: Encoding | None = None

    def __init__(
        self,
        services: SharedServices,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        options: SendOptions,
        consumers: int = 1,
    ) -> None:
        self._growing = options.get("growing", False)
        super().__init__(services, id, cache, blocks, options)
        if type(consumers) is not int or consumers < 1:
            raise UsageError(f"consumers={consumers!r}: pass a number of at least 1")
        self._peers = consumers
        group_bytes = options.get("group_bytes")
        number = type(group_bytes) is int
        if group_bytes is not None and not (number and group_bytes > 0):
            raise UsageError(
                f"group_bytes={group_bytes!r}: pass a number of bytes; 1 sends layer "
                "by layer"
            )
        if "hashes" in options or "content" in options:
            listed = listed_hashes(options.get("hashes"), self._geometry)
            self._hashes = digest(listed, options.get("content"))
        self._group_bytes: int = GROUP_BYTES if group_bytes is None else group_bytes
        encode = None if self._encoding is None else self._encoding.encode
        self._log: ReadyLog = ReadyLog(
            cache, self._lists, self._loop, self._marked, services.devices, encode
        )

    # --- what users call --------------------------------------------------------------

    def extend(self, blocks: Blocks) -> None:
        """Add the next blocks of a growing transfer. Thread-safe and non-blocking.

        Args:
            blocks: The blocks' ids, or ``{group: ids}``; they continue the list.

        Raises:
            UsageError: The transfer is not growing, there are more blocks than
                ``tokens`` need, or a block is out of range or listed already.
        """
        self._thread.check_process("Outgoing.extend")
        if not self._growing:
            raise UsageError("extend: this transfer was not begun with growing=True")
        self._log.name(self._cache.block_lists(blocks))

    def ready(
        self,
        layers: Which = None,
        blocks: Which = None,
        *,
        group: str | None = None,
        after: Any = None,
    ) -> None:
        """Mark a part of the cache as final; it is sent at once.

        Thread-safe and non-blocking. The memory must be neither written nor reused
        until :meth:`drained` has returned.

        Args:
            layers: A layer by the model's index, or a slice of them; None for all.
            blocks: A position in the transfer's block list (not a block id), or a
                slice; None for all.
            group: A group of a hybrid model's cache; None if there is only one group.
            after: A condition for the part to be ready: a future, or a torch or CuPy
                event recorded on the stream that writes the part. Neither the caller
                nor the device waits.

        Raises:
            UsageError: There is no such part, or it was marked before.
        """
        if self._thread.ident == FORKED:
            self._thread.check_process("Outgoing.ready")
        self._log.add(layers, blocks, group, after)

    def finish(self, *, partial: bool = False) -> None:
        """Commit, because no more marks follow. Thread-safe and non-blocking.

        Does nothing after the transfer has ended, so a forward pass that stopped early
        because of :meth:`done` may still call it.

        Args:
            partial: Commit even if parts were not marked; the outcome names these.

        Raises:
            UsageError: Parts were not marked, and ``partial`` is not set.
        """
        if self._thread.ident == FORKED:
            self._thread.check_process("Outgoing.finish")
        if self._outcome is None:
            self._log.finish(partial=partial)

    def renew_lease(self) -> None:
        """Restart the lease of the blocks while a consumer is missing.

        Use it if the consumer is known to be still coming. Does nothing after the
        transfer has ended.
        """
        self._thread.check("Outgoing.renew_lease")
        self._renew_lease()

    async def __aenter__(self) -> Self:
        """Return the transfer itself."""
        self._thread.check("async with Outgoing")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish, or abort if an exception left the block.

        Raises:
            UsageError: Parts were not marked; the transfer is aborted.
        """
        if self._thread.ident == FORKED:
            return  # in a forked child: the transfer is the parent's
        if kind is not None:
            self.abort(f"{kind.__name__} in the producer")
        else:
            try:
                self.finish()
            except UsageError as exc:
                self.abort(str(exc))
                raise

    # --- the producer's half ----------------------------------------------------------

    def _padded(self, lists: BlockLists) -> BlockLists:
        return grown_lists(lists, self._tokens, self._cache)

    def _coded(self, codec: object) -> tuple[PagedCache, BlockLists]:
        threads = self._services.codec_threads
        self._encoding = Encoding(threads, self._cache, self._lists, codec)
        return self._encoding.memory, self._encoding.lists

    def _held_by(self, offer: TransferOffer, peer: Geometry) -> Mapping[str, Bits]:
        return offer.read_have(peer)

    def _check_plan(self, plan: TransferPlan) -> None:
        """Refuse a consumer whose number of tokens differs from the others'.

        Raises:
            ProfileMismatch: The number differs.
        """
        mine = plan.template.tokens
        for other in self._legs:
            theirs = other.plan.template.tokens if other.planned else mine
            if mine != theirs:
                raise ProfileMismatch(
                    "the consumers of one transfer request different tokens: "
                    f"{theirs} and {mine}",
                    fields=("tokens",),
                )

    def _flow(self, leg: Leg) -> SendFlow:
        return SendFlow(self, leg)

    def _met(self, leg: Leg, offer: TransferOffer) -> None:
        if offer.landed:
            before = leg.landed.left
            leg.landed.mark_boxes([Segment(*box) for box in offer.landed])
            if leg.landed.left < before:
                self._renew_lease()

    def _marked(self) -> None:
        """Let every leg send the parts that were marked since the last call."""
        self._log.woken = False
        if self._log.failed and self._outcome is None:
            self.abort(self._log.failed)
        if self._ring is not None:
            self._note("marked", *self._log.layers)
        for leg in self._legs:
            if leg.flow is not None:
                leg.flow.send()

    def _leg_over(self, leg: Leg, error: KVWireError | None) -> None:
        if error is not None:
            leg.reason = str(error)
            # A part that one rank lacks is useless to the whole group.
            for other in self._in(*ON_LINK):
                other.refuse(RequestCancelled(leg.reason), WireCode.CANCELLED)
            self._end(error)
        elif self._peers == 1 or len(self._in(LegState.OVER)) == self._peers:
            self._end(PeerCancelled(UNMARKED))
        else:
            leg.phases.enter("commit")  # waiting for the others' frames
            self._renew_lease()

    def _record(self) -> None:
        super()._record()
        self._log.close()

    def _stop_jobs(self) -> int:
        # Encoding threads read the caller's blocks, so the transfer drains after the
        # last.
        reads = None if self._encoding is None else self._encoding.stop()
        if reads is None:
            return 0
        reads.add_done_callback(self._jobs_over)
        return 1

    def _jobs_over(self, reads: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: no waiter is left
            self._loop.call_soon_threadsafe(self._one_free)

    @property
    def _finishing(self) -> bool:
        return self._log.finished and bool(self._legs)

    @property
    def _next_move(self) -> NextMove:
        peers = [shown(leg.link.peer.name) for leg in self._in(*OFF_LINK)]
        if peers:
            return NextMove("peer", f"the connection to {', '.join(peers)} is lost")
        peers = [shown(leg.link.peer.name) for leg in self._in(LegState.ASKED)]
        if peers:
            return NextMove("peer", f"the peer {', '.join(peers)} has not expected it")
        if self._unasked and not self._legs:
            return NextMove("peer", self._unasked())
        legs = len(self._legs)
        if legs < self._peers:
            return NextMove("peer", f"{legs} of {self._peers} consumers have pulled it")
        marked, layers = self._log.layers
        if not self._log.finished:
            text = (
                f"finish() has not been called: {marked} of {layers} layers are marked"
            )
            return NextMove("program", text)
        if not self._log.all_in:
            return NextMove("device", "an event that a mark waits for has not fired")
        text = ", ".join(
            f"{shown(leg.link.peer.name)} has {leg.landed.layers} of {layers} layers"
            for leg in self._legs
            if leg.planned and leg.state is not LegState.OVER
        )
        return NextMove("peer", f"the consumer has not received all of it: {text}")

    @property
    def _progress(self) -> Progress:
        marked, layers = self._log.layers
        met = [leg for leg in self._legs if leg.planned]
        if not met:
            return Progress(layers, marked)
        slowest = min(met, key=lambda leg: leg.landed.nbytes)
        landed = slowest.landed
        return Progress(
            layers, marked, landed.layers, slowest.plan.nbytes, landed.nbytes
        )


class SendFlow:
    """Sends the marked parts to one consumer, over one link."""

    __slots__ = (
        "_cursor",
        "_held",
        "_held_as",
        "_held_bytes",
        "_leg",
        "_memory_of",
        "_out",
        "_pieces",
        "_record",
        "_sent",
        "_turn",
        "under_way",
    )

    def __init__(self, out: Outgoing, leg: Leg) -> None:
        assert leg.core is not None
        self._out = out
        self._leg = leg
        self._memory_of = leg.memory_of
        self._record = leg.link.transfers.records[leg.core]
        self._record.on_sent = self._link_sent
        # Chunks of a device overtake each other in staging.
        self._record.in_order = out._memory.device is None
        # How many marks of the log were read.
        self._cursor = 0
        # Marks waiting for their neighbours, joined as one, and their part of the plan.
        self._held: ReadyRange | None = None
        self._held_as: Segment | None = None
        self._held_bytes = 0
        # Unacknowledged segments.
        self.under_way: int = 0
        # Sends the parts held back, in a separate turn of the loop.
        self._turn: asyncio.Handle | None = None
        # Pieces to send, in this turn or once the link has sent others.
        self._pieces: deque[tuple[Segment, int]] = deque()
        self._sent: dict[int, Segment] = {}

    def send(self, *, in_turn: bool = False) -> None:
        """Turn the marks made since the last call into segments."""
        leg = self._leg
        log = self._out._log
        if leg.state is not LegState.MOVING and leg.state is not LegState.SETTLED:
            return
        assert leg.core is not None
        if leg.core.over:  # the leg is about to handle its end
            return
        # Checked before the log is read: another thread may add the last mark
        # meanwhile.
        all_in = log.finished and log.all_in
        try:
            while self._cursor < len(log.log):
                self._take(log.log[self._cursor])
                self._cursor += 1
            if self._held is not None and (all_in or in_turn or self._idle):
                self._flush()
        except UsageError as exc:
            self._out._stop(exc, WireCode.TOO_LARGE)
            return
        self._send_pieces(all_in=all_in, complete=all_in and log.complete)
        if all_in or self._record.sending_bytes:
            leg.link.run()

    def _send_pieces(self, *, all_in: bool, complete: bool) -> None:
        """Send pieces until the link has enough, and commit after the last one.

        Both sides look up the address of each fragment; for a GiB at once that would
        block their loops for milliseconds. So at most AHEAD_BYTES are looked up ahead
        of the link, which calls again when half of them have been sent.
        """
        leg = self._leg
        out = self._out
        pieces = self._pieces
        record = self._record
        link = leg.link
        core = leg.core
        phases = leg.phases
        assert core is not None
        if leg.state is LegState.SETTLED:
            pieces.clear()  # the consumer has all of it, and may have reused its memory
        # The last segment is flagged as the last. If there is no segment, COMMIT is a
        # separate frame.
        rides = all_in and bool(pieces)
        # Even if the link takes everything at once, other tasks get a turn of the loop.
        room = WAKEUP_BYTES
        while pieces and room > 0 and record.sending_bytes < AHEAD_BYTES:
            segment, nbytes = pieces.popleft()
            leg.grouped = max(leg.grouped, segment.layers)
            memory = self._memory_of(segment)
            commit = 1 + complete if rides and not pieces else 0
            # From here on the memory is held until the link releases it.
            sent = link.send_segment(core, segment, memory, nbytes, commit)
            if not record.sending_bytes:
                room -= nbytes
            elif phases.phase != "wire":
                phases.enter("wire")
            self._sent[sent.number] = segment  # bounded: SEGMENTS_MAX
            self.under_way += 1
            if out._ring is not None:
                out._note("sent", segment.layer, segment.layers, nbytes)
        record.on_sent_bytes = AHEAD_BYTES // 2 if pieces else 0
        if room <= 0:
            self._link_sent()
        if all_in and not pieces:
            leg.step(LegInput.COMMIT)
            if not (self.under_way and phases.phase == "wire"):
                phases.enter("wire" if self.under_way else "commit")
            if not rides:
                link.transfers.commit(core, complete=complete)

    def event(self, event: TransferEvent) -> None:
        """Record that segments have arrived at the consumer."""
        assert isinstance(event, SegmentsAcknowledged)
        leg = self._leg
        out = self._out
        numbers = event.numbers
        leg.confirmed = True
        for number in numbers:
            leg.landed.mark(self._sent.pop(number))
        out._renew_lease()
        self.under_way -= len(numbers)
        if out._ring is not None:
            out._note("acknowledged", len(numbers))
        if not self.under_way:
            committed = leg.state is LegState.COMMITTED
            leg.phases.enter("commit" if committed else "mark_wait")
        self.send()

    def end(self, error: KVWireError | None) -> None:
        """Record the segments that landed without an event, and the damaged ones."""
        self._record.on_sent = None  # break the reference cycle
        if error is not None:
            return
        leg = self._leg
        out = self._out
        segments = self._record.segments
        leg.confirmed = True
        for number, segment in self._sent.items():
            if segments[number].damaged:
                leg.damaged.append(segment)  # bounded: SETTLED_MAX
            else:
                leg.landed.mark(segment)
        landed = len(self._sent) - len(leg.damaged)
        if out._ring is not None and landed:
            out._note("acknowledged", landed)

    def _link_sent(self) -> None:
        """Send the next pieces or wait for marks, after the link has sent all."""
        leg = self._leg
        if not self._pieces and leg.state is LegState.MOVING:
            leg.phases.enter("mark_wait")
        due = self._pieces or (self._held is not None and self._idle)
        if due and self._turn is None:
            self._turn = self._out._loop.call_soon(self._in_turn)

    @property
    def _idle(self) -> bool:
        """Whether a held-back mark may be sent alone."""
        return not self._record.sending_bytes and self.under_way < SEGMENTS_TOGETHER

    def _in_turn(self) -> None:
        self._turn = None
        if self._leg.flow is self:  # and no later link carries the leg
            self.send(in_turn=True)

    def _take(self, mark: ReadyRange) -> None:
        """Hold a mark back, to join it with its neighbours into one segment."""
        held = self._held
        plan = self._leg.plan
        if held is not None:
            if _joins(held, mark):
                layers = range(held.layers.start, mark.layers.stop)
                mark = ReadyRange(mark.group, layers, mark.blocks)
            else:
                self._flush()
        named = plan.marked(plan.indices[mark.group], mark.layers, mark.blocks)
        self._held = mark
        self._held_as = named
        self._held_bytes = 0 if named is None else plan.nbytes_of(named)
        if self._held_bytes >= self._out._group_bytes:
            self._flush()

    def _flush(self) -> None:
        """Queue the held-back mark, as one segment or in pieces."""
        leg = self._leg
        named = self._held_as
        nbytes = self._held_bytes
        self._held = None
        if named is None or leg.state is LegState.SETTLED:
            return
        parts = [(named, nbytes)]
        if leg.links > 1:  # after a lost link, only parts that have not landed
            parts = [(p, leg.plan.nbytes_of(p)) for p in leg.landed.lacking(named)]
        for part, nbytes in parts:
            if nbytes > SEGMENT_BYTES:
                self._cut(part, nbytes)
            elif nbytes:
                self._pieces.append((part, nbytes))  # bounded: SEGMENTS_MAX
        if len(self._record.segments) + len(self._pieces) > SEGMENTS_MAX:
            raise UsageError(
                f"the transfer has more than {SEGMENTS_MAX} segments: mark more "
                "layers or blocks per call"
            )

    def _cut(self, segment: Segment, nbytes: int) -> None:
        """Queue a segment in pieces, none much larger than SEGMENT_BYTES.

        The pieces are whole layers, so that the first layers can be read while the
        others are on their way; unless a block's layers are contiguous in memory.
        """
        plan = self._leg.plan
        order = plan.groups[segment.group].order
        layers = segment.layers
        if order.index("layer") < order.index("block"):
            layers = max(1, SEGMENT_BYTES * segment.layers // nbytes)
        pieces = -(-nbytes * layers // segment.layers // SEGMENT_BYTES)
        granules = -(-segment.granules // max(1, pieces))
        for layer in _cut_range(segment.layer_range, layers):
            for part in _cut_range(segment.granule_range, granules):
                piece = Segment(
                    segment.group, layer.start, len(layer), part.start, len(part)
                )
                if nbytes := plan.nbytes_of(piece):
                    self._pieces.append((piece, nbytes))  # bounded: SEGMENTS_MAX


def _cut_range(whole: range, step: int) -> list[range]:
    return [whole[start : start + step] for start in range(0, len(whole), step)]


def _joins(before: ReadyRange, mark: ReadyRange) -> bool:
    """Return whether a mark continues the previous one with the next layers."""
    return (
        before.group == mark.group
        and before.blocks == mark.blocks
        and before.layers.stop == mark.layers.start
    )
