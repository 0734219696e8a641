"""The consumer's end of a KV transfer: segments land and layers become readable.

On each link a flow checks every segment against the plan and gives it memory. With a
codec, a part that has arrived is decoded on threads before it counts as landed, both in
the outcome and for reading a layer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from typing import Any, Final, Self

import numpy as np

from kvwire.aio import FORKED, AsyncWith, running_loop, unusable
from kvwire.errors import (
    BackendUnavailable,
    ConnectionClosed,
    IntegrityError,
    KVWireError,
    PeerCancelled,
    ProfileMismatch,
    ProtocolError,
    RequestCancelled,
    RequestError,
    UsageError,
    WireCode,
    again,
    shown,
    wrong_type,
)
from kvwire.kv.blocks import Bits, BlockLists, Blocks
from kvwire.kv.geometry import Geometry
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import Outcome, join_outcomes
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanSide, Segment
from kvwire.limits import LANDED_BOXES_MAX, SEGMENT_BYTES
from kvwire.memory.copy import copy
from kvwire.memory.device.device_copies import DeviceFailed
from kvwire.proto.events import SegmentLanded, SegmentMarked
from kvwire.proto.records import CHUNK_LANDED, SegmentRecord
from kvwire.transfers.codec import Decoding
from kvwire.transfers.dedup import digest, held, listed_hashes
from kvwire.transfers.leg import DAMAGED, Leg, TransferEvent
from kvwire.transfers.offer import TransferOffer, pack_have
from kvwire.transfers.options import ReceiveOptions
from kvwire.transfers.ports import SharedServices
from kvwire.transfers.state import OFF_LINK, OVER, LegState, TransferState
from kvwire.transfers.transfer import NextMove, Progress, Transfer
from kvwire.types import whole

# The most bytes of one segment, unless it is a single granule: a mark is divided into
# equal segments, each less than twice SEGMENT_BYTES. The consumer maps a whole segment
# in one step.
SEGMENT_BYTES_MAX: Final = 2 * SEGMENT_BYTES

_OF_CONTENT: Final = frozenset({"hashes", "content", "have"})


class Incoming(Transfer):
    """Receives a transfer as its consumer. Created by ``pull`` and ``expect``.

    Await it for its :class:`~kvwire.Outcome`: a partial or failed transfer has an
    outcome and raises no exception. All methods belong to the loop of the communicator.
    """

    _receives = True
    _side = PlanSide.CONSUMER
    # Decodes landed parts; None without a codec.
    _decoding: Decoding | None = None
    # The parts that may be read; None while there are none.
    _readable: Landed | None = None
    # Whether parts were under way on a link; those that landed need not be sent again.
    _has_moved = False
    # The parts that the last offer reported as landed.
    _reported: tuple[Segment, ...] = ()

    def __init__(
        self,
        services: SharedServices,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        options: ReceiveOptions,
    ) -> None:
        super().__init__(services, id, cache, blocks, options)
        if not cache.writable:
            raise UsageError(
                "a tensor of this cache is read-only; receiving needs writable tensors"
            )
        self._have: dict[str, Bits] = {}
        if options.keys() & _OF_CONTENT:
            listed = listed_hashes(options.get("hashes"), self._geometry)
            self._have = held(options.get("have"), listed, self._lists)
            self._hashes = digest(listed, options.get("content"))
        self._gates: dict[tuple[int, str | None], list[asyncio.Future[None]]] = {}

    # --- what users call --------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Return the transfer itself."""
        self._thread.check("async with Incoming")
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Abort the transfer unless it has ended, and wait until it is drained.

        Cancel safety: a cancelled wait ends at once, before the memory is free. So
        release the memory in the option ``free``, which is called in any case.
        """
        if self._thread.ident == FORKED:
            return  # in a forked child: the transfer is the parent's
        self.abort("its block has ended")
        await self.drained()

    @property
    def met(self) -> bool:
        """Whether a matching peer has published or pushed it."""
        return any(leg.planned for leg in self._legs)

    @property
    def carries(self) -> Mapping[str, tuple[range, range]]:
        """Return the model's layers and KV heads in the transfer, by group.

        These are the ones that both sides have; empty before it is :attr:`met`.
        """
        groups = self._legs[0].plan.groups if self.met else ()
        return {walk.group: (walk.layers, walk.heads) for walk in groups}

    async def layer(self, layer: int, group: str | None = None) -> None:
        """Wait until a layer of every block has landed, and may be read.

        Args:
            layer: The layer, by the model's index.
            group: A group of a hybrid model's cache; None for all groups with this
                layer.

        Raises:
            UsageError: There is no such layer or group.
            RequestError, ConnectionClosed: The transfer ended before the layer landed;
                the error is the reason, and the outcome lists the landed blocks.
                RequestCancelled: :meth:`abort` was called. PeerCancelled: the producer
                ended the transfer, or did not mark the layer ready. DeadlineExceeded:
                the deadline or the lease has passed.
            ProfileMismatch: The two sides do not fit; the error names the fields.

        Cancel safety: safe, it only watches.
        """
        if running_loop() is not self._thread.loop:
            self._thread.check("Incoming.layer")
        try:
            if self.layer_landed(layer, group):
                return
        except UsageError:
            await asyncio.sleep(0)  # one turn of the loop: see kvwire.aio
            raise
        if self._outcome is None:
            gate: asyncio.Future[None] = self._loop.create_future()
            gates = self._gates.setdefault((layer, group), [])
            gates.append(gate)
            try:
                await gate
            finally:
                if gate in gates:
                    gates.remove(gate)
        if self._outcome is not None and not self.layer_landed(layer, group):
            await asyncio.sleep(0)
            assert self._cause is not None
            raise _not_landed(layer, self._outcome, self._cause) from self._cause

    def layer_event(self, layer: int, group: str | None = None) -> Any:
        """Return the event after which a stream may read a landed layer.

        It is meant for streams of the cache's device. The layer has landed for the host
        as well, so the event has already fired, and waiting for it costs a stream
        nothing. It only makes the order explicit, for tools and for streams of other
        devices.

        Returns:
            A torch or CuPy event, depending on the library that moves the cache.

        Raises:
            UsageError: There is no such layer, it has not landed, or the cache is in
                host memory.
        """
        self._thread.check("Incoming.layer_event")
        landed = self.layer_landed(layer, group)
        device = self._cache.device
        if device is None:
            raise UsageError(
                "layer_event: this cache is in host memory; use `await layer(n)`"
            )
        if not landed:
            raise UsageError(f"layer_event: layer {layer} has not landed yet")
        return self._services.devices.copy_engine(device).landed

    def layer_landed(self, layer: int, group: str | None = None) -> bool:
        """Return whether a layer of every block has landed.

        Raises:
            UsageError: There is no such layer or group.
        """
        groups = self._cache.groups
        if type(layer) is not int and whole(layer) is None:
            raise UsageError(f"layer {layer!r}: pass the layer's index in the model")
        if group is not None and group not in groups:
            raise UsageError(
                f"unknown group {group!r}; the groups are {', '.join(groups)}"
            )
        named = groups.values() if group is None else (groups[group],)
        for part in named:
            first = part.spec.first_layer
            if layer in range(first, first + part.spec.layers):
                readable = self._readable
                return readable is not None and readable.layer(layer, group)
        indices = {part.spec.layer_indices for part in named}
        there = ", ".join(f"{one.start} to {one.stop - 1}" for one in indices)
        raise UsageError(f"layer {layer} is not in this cache, which has {there}")

    # --- the consumer's half ----------------------------------------------------------

    def _offer(self, peer_id: bytes = b"", plan: bytes = b"") -> TransferOffer:
        # Parts that do not fit here are sent again, which is only slower.
        landed = self._legs[0].landed.boxes(LANDED_BOXES_MAX) if self._has_moved else ()
        self._reported = tuple(landed)
        return TransferOffer(
            geometry=self._geometry.packed,
            endpoint_id=self._endpoint_id,
            peer_id=peer_id,
            hashes=self._hashes,
            have=pack_have(self._have) if self._have else (),
            landed=self._reported,
            plan=plan,
            settled=self._state in OVER and self._given_up is None,
            trace=self._trace,
        )

    def _coded(self, codec: object) -> tuple[PagedCache, BlockLists]:
        threads = self._services.codec_threads
        self._decoding = Decoding(
            threads, self._cache, self._lists, codec, self._loop, self._piece_over
        )
        return self._decoding.memory, self._decoding.lists

    def _held_by(self, offer: TransferOffer, peer: Geometry) -> Mapping[str, Bits]:
        return self._have

    def _flow(self, leg: Leg) -> ReceiveFlow:
        return ReceiveFlow(self, leg)

    def _met(self, leg: Leg, offer: TransferOffer) -> None:
        if self._readable is None:
            self._readable = leg.landed
            if self._decoding is not None:
                self._readable = self._decoding.begin(leg.plan)
            # Layers that are not sent, or were here before, need no waiting.
            if self._gates:
                self._open_gates()

    def _leg_over(self, leg: Leg, error: KVWireError | None) -> None:
        assert error is not None, "a leg ended well before its transfer"
        self._end(error)

    def _open_gates(self) -> None:
        """Wake the waiters of layers that have landed; all of them at the end."""
        readable = self._readable
        for (layer, group), gates in list(self._gates.items()):
            over = self._outcome is not None
            if over or (readable is not None and readable.layer(layer, group)):
                del self._gates[layer, group]
                for gate in gates:
                    if not gate.done():
                        gate.set_result(None)

    # --- the end ----------------------------------------------------------------------

    def _stop(self, error: KVWireError, code: WireCode) -> None:
        if self._decoding is not None and self._state not in OVER:
            # pieces that no thread has started are skipped
            self._decoding.stopped = True
        super()._stop(error, code)

    def _record(self) -> None:
        """Record the outcome; with a codec, after the last piece is decoded."""
        decoding = self._decoding
        if decoding is not None and self._readable is not None:
            self._decode_landed()
            if decoding.jobs:
                return  # the last piece to be decoded ends it
            self._legs[0].landed = self._readable
        super()._record()
        self._decoding = None  # break the reference cycle
        if self._gates:
            self._open_gates()

    def _decode_landed(self) -> None:
        """Start to decode the landed parts that were not started yet."""
        decoding = self._decoding
        if decoding is not None and self._readable is not None:
            for segment in self._legs[0].landed.boxes(LANDED_BOXES_MAX):
                decoding.begin_with(segment)

    def _piece_over(self, error: Exception | None) -> None:
        """Handle the end of decoding a piece; the loop calls it."""
        decoding = self._decoding
        assert decoding is not None
        if error is None:
            if self._gates:
                self._open_gates()
        elif not isinstance(error, RequestCancelled):
            # a failed device may write for ever
            self._busy += isinstance(error, DeviceFailed)
            wrong = BackendUnavailable(f"the landed bytes were not decoded: {error}")
            if self._state in OVER:
                self._cause = wrong
            self._stop(wrong, WireCode.OTHER)
        if self._state is TransferState.ENDING and not decoding.jobs:
            self._try_to_end()

    # --- what snapshots show ----------------------------------------------------------

    @property
    def _next_move(self) -> NextMove:
        if not self._legs:
            text = self._unasked() if self._unasked else "no peer has pushed it"
            return NextMove("peer", text)
        leg = self._legs[0]
        peer = shown(leg.link.peer.name)
        if leg.state is LegState.ASKED:
            return NextMove("peer", f"the peer {peer} has not published it")
        if leg.state in OFF_LINK:
            return NextMove("peer", f"the connection to {peer} is lost")
        layers, marked, landed, _, _ = self._progress
        text = "everything marked has landed, but the producer has not committed"
        if landed < marked:
            text = f"{landed} of {marked} marked layers have landed, of {layers}"
        elif marked < layers:
            text = f"it has marked {marked} of {layers} layers"
        return NextMove("peer", f"the peer {peer} has not finished it: {text}")

    @property
    def _progress(self) -> Progress:
        if not self.met:
            return Progress()
        leg = self._legs[0]
        layers = sum(len(walk.layers) for walk in leg.plan.groups)
        landed = leg.landed
        flow = leg.flow
        marked = flow.marked_layers if isinstance(flow, ReceiveFlow) else 0
        return Progress(
            layers,
            max(marked, landed.layers),
            landed.layers,
            leg.plan.nbytes,
            landed.nbytes,
        )


class ReceiveFlow:
    """Receives one producer's marked segments over one link."""

    __slots__ = (
        "_inc",
        "_leg",
        "_memory_of",
        "_promised",
        "_segments",
        "_under_way",
    )

    def __init__(self, inc: Incoming, leg: Leg) -> None:
        self._inc = inc
        self._leg = leg
        self._memory_of = leg.memory_of
        self._segments: dict[int, Segment] = {}
        # The number of segments on their way.
        self._under_way = 0
        # The parts that were marked, or were reported to the producer as landed. No
        # part may be marked twice.
        self._promised = Landed(leg.plan)
        for segment in inc._reported:
            self._promised.mark(segment)
        assert leg.core is not None
        if inc._memory.device is None:
            leg.link.transfers.records[leg.core].take = self._take

    @property
    def marked_layers(self) -> int:
        """Return the known number of layers that the producer has marked."""
        return self._promised.layers

    def event(self, event: TransferEvent) -> None:
        """Give memory to a newly marked segment, or record one that has arrived.

        Raises:
            ProtocolError: The segment is not part of the plan, or was marked before.
        """
        leg = self._leg
        inc = self._inc
        if isinstance(event, SegmentMarked):
            record = event.segment
            segment = self._checked(record)
            self._segments[record.number] = segment  # bounded: SEGMENTS_MAX
            if not self._under_way:
                leg.phases.enter("wire")
            self._under_way += 1
            inc._has_moved = True
            leg.grouped = max(leg.grouped, segment.layers)
            memory = self._memory_of(segment)
            leg.link.transfers.place(record, inc._lend(memory))
            return
        assert isinstance(event, SegmentLanded)
        record = event.segment
        segment = self._segments[record.number]
        self._under_way -= 1
        if not self._under_way:
            leg.phases.enter("mark_wait")
        if record.damaged:
            leg.damaged.append(segment)  # bounded: SEGMENTS_MAX
            missing = missing_chunks(record, leg.link.chunk_bytes)
            leg.landed.mark_but(segment, missing)
            return
        self._landed(record, segment)

    def _take(self, record: SegmentRecord, body: bytes | memoryview | None) -> None:
        """Copy a small segment to its place, or record that it arrived damaged."""
        leg = self._leg
        inc = self._inc
        if leg.state is not LegState.MOVING or inc._state in OVER:
            # Its memory may have a new owner.
            leg.event(SegmentMarked(segment=record))
            return
        segment = self._checked(record)
        inc._has_moved = True
        leg.grouped = max(leg.grouped, segment.layers)
        if not self._under_way:
            leg.phases.enter("mark_wait")  # again, from now on
        if body is None:
            leg.damaged.append(segment)  # bounded: SEGMENTS_MAX
            return
        copy(memoryview(body), self._memory_of(segment))
        self._landed(record, segment)

    def _landed(self, record: SegmentRecord, segment: Segment) -> None:
        """Record a segment that has landed, and wake its readers."""
        leg = self._leg
        inc = self._inc
        leg.landed.mark(segment)
        if inc._ring is not None:
            inc._note("landed", segment.layer, segment.layers, record.nbytes)
        inc._lease_until = None
        if inc._lease is not None:
            inc._renew_lease()
        if inc._decoding is not None:
            inc._decoding.begin_with(segment)
        if inc._gates:
            inc._open_gates()

    def send(self) -> None:
        """Send nothing: a consumer has no marks."""

    def end(self, error: KVWireError | None) -> None:
        """Record the chunks of incomplete segments that arrived."""
        leg = self._leg
        inc = self._inc
        if leg.core is not None:  # break the reference cycle
            leg.link.transfers.records[leg.core].take = None
        if inc._outcome is not None:
            return
        if leg.core is not None and self._segments:
            segments = leg.link.transfers.records[leg.core].segments
            before = leg.landed.left
            for number, segment in self._segments.items():
                if not segments[number].over:
                    missing = missing_chunks(segments[number], leg.link.chunk_bytes)
                    leg.landed.mark_but(segment, missing)
            if leg.landed.left < before:
                inc._renew_lease()
        inc._decode_landed()  # landed parts are not sent again

    def _checked(self, record: SegmentRecord) -> Segment:
        """Return a marked segment as a part of the plan, after checking it."""
        plan = self._leg.plan
        segment = tuple.__new__(Segment, record.box)
        try:
            nbytes = plan.check(segment)
        except UsageError as exc:
            raise ProtocolError("KVW-TR-09", str(exc)) from None
        if record.nbytes != nbytes:
            raise ProtocolError(
                "KVW-TR-09",
                f"segment {record.number} has {record.nbytes} bytes, but the plan has "
                f"{nbytes}",
            )
        if segment.granules > 1 and record.nbytes > SEGMENT_BYTES_MAX:
            raise ProtocolError(
                "KVW-TR-12",
                f"segment {record.number}: it has {record.nbytes} bytes in "
                f"{segment.granules} granules; a segment of several granules has at "
                f"most {SEGMENT_BYTES_MAX}",
            )
        if not self._promised.claim(segment):
            raise ProtocolError(
                "KVW-TR-11", f"segment {record.number}: a part of it was already marked"
            )
        return segment


def missing_chunks(core: SegmentRecord, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) for each run of a segment's chunks that did not land."""
    count = -(-core.nbytes // chunk_bytes)
    landed = np.ones(count + 2, np.bool_)
    landed[1:-1] = np.frombuffer(core.arrived or bytes(count), np.uint8) == CHUNK_LANDED
    edges = np.flatnonzero(landed[1:] != landed[:-1]) * chunk_bytes
    ends = np.minimum(edges, core.nbytes).tolist()
    return [
        (first, end - first) for first, end in zip(ends[::2], ends[1::2], strict=True)
    ]


def _not_landed(layer: int, outcome: Outcome, error: KVWireError) -> KVWireError:
    """Return the error for a waiter of a layer, like the transfer's own error."""
    reasons = outcome.missing.reasons
    text = f"layer {layer} did not land: {'; '.join(reasons)}"
    if isinstance(error, ProfileMismatch):
        return ProfileMismatch(text, fields=error.fields)
    if DAMAGED in reasons and isinstance(error, PeerCancelled):
        return IntegrityError(text)
    if isinstance(error, RequestError | ConnectionClosed):
        return type(error)(text)
    return again(error)


@unusable("await it first: `outcome = await joined`", result=Outcome)
class Joined(AsyncWith):
    """Joins several incoming transfers of the same blocks. Created by :func:`join`.

    A tensor-parallel producer group sends each rank's heads of the same blocks; the
    consumer waits for all of them, layer by layer, and gets one outcome.
    """

    def __init__(self, parts: tuple[Incoming, ...]) -> None:
        self._parts = parts

    def __await__(self) -> Generator[Any, Any, Outcome]:
        return self._outcome().__await__()

    def done(self) -> bool:
        """Return whether the outcome is known, that is, every part's outcome."""
        return all(part.done() for part in self._parts)

    @property
    def outcome(self) -> Outcome | None:
        """Return the outcome, or None while it is not known."""
        outcomes = [part.outcome for part in self._parts]
        known = [outcome for outcome in outcomes if outcome is not None]
        return join_outcomes(known) if len(known) == len(outcomes) else None

    @property
    def is_drained(self) -> bool:
        """Whether kvwire can no longer touch the blocks."""
        return all(part.is_drained for part in self._parts)

    def layer_landed(self, layer: int, group: str | None = None) -> bool:
        """Return whether a layer has landed from every producer.

        Raises:
            UsageError: There is no such layer or group.
        """
        return all(part.layer_landed(layer, group) for part in self._parts)

    async def layer(self, layer: int, group: str | None = None) -> None:
        """Wait until a layer has landed from every producer.

        Raises:
            UsageError: There is no such layer or group.
            RequestError, ConnectionClosed, ProfileMismatch: A transfer ended before the
                layer landed; the error is the reason. The wait does not continue for
                the others.

        Cancel safety: safe, it only watches.
        """
        gates = [
            asyncio.ensure_future(part.layer(layer, group)) for part in self._parts
        ]
        try:
            await asyncio.gather(*gates)
        finally:
            for gate in gates:
                gate.cancel()
            await asyncio.gather(*gates, return_exceptions=True)

    async def drained(self) -> None:
        """Wait until kvwire can no longer touch the blocks.

        Cancel safety: safe, it only watches.
        """
        for part in self._parts:
            await part.drained()

    def abort(self, reason: str = "aborted") -> None:
        """End all its transfers."""
        for part in self._parts:
            part.abort(reason)

    async def __aenter__(self) -> Self:
        """Return the joined transfers."""
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Abort the transfers that have not ended, and wait until all are drained.

        Cancel safety: as for :class:`Incoming`.
        """
        if self._parts[0]._thread.ident == FORKED:
            return  # they are its parent's
        self.abort("its block has ended")
        await self.drained()

    async def _outcome(self) -> Outcome:
        return join_outcomes([await part for part in self._parts])


def join(*parts: Incoming) -> Joined:
    """Combine several incoming transfers of the same blocks into one.

    Raises:
        UsageError: No transfer was passed, or their block lists differ.
    """
    if not parts:
        raise UsageError("join: pass the Incoming of each producer")
    for part in parts:
        if not isinstance(part, Incoming):
            raise wrong_type("join", part, "the Incoming of a producer")
        _require_same_lists(parts[0], part)
    return Joined(parts)


def _require_same_lists(one: Incoming, another: Incoming) -> None:
    if one._lists.keys() != another._lists.keys():
        raise UsageError(
            f"join: {one.id!r} has the groups {', '.join(one._lists)}, "
            f"{another.id!r} has {', '.join(another._lists)}"
        )
    for group, ids in one._lists.items():
        if not np.array_equal(ids, another._lists[group]):
            raise UsageError(
                f"join: the block lists of {one.id!r} and {another.id!r} differ in "
                f"group {group!r}"
            )
