"""Two live cores after their handshake, and everything that can happen to them.

The bytes decide: what both applications ask for, when frames arrive, what time it is,
how the wires behave, and which frames of its own one end sends that no honest core
would have sent. Whatever it is: every request ends once, memory that is given back is
not touched, and nothing is raised but what is documented.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import msgspec
from msgspec import inspect

from kvwire.errors import ConnectionClosed, UsageError
from kvwire.proto.events import TransferOpened
from kvwire.proto.lanes import LaneStage
from kvwire.proto.records import RequestRecord
from kvwire.proto.regions import RegionRecord
from kvwire.proto.state import RequestKind, RequestStage
from kvwire.types import Access, Role, TrustMode
from kvwire.wire.control import _BODIES, AccessBody
from kvwire.wire.header import FrameType
from tests.programs.fuzz.reader import Reader
from tests.programs.fuzz.targets.handshake import copied
from tests.support.core_pair.handshakes import SMALL, Shaking, begin, identity, shake
from tests.support.core_pair.pair_lanes import Half, PairLanes
from tests.support.core_pair.peer import ConnectionPair, Peer

_STEPS_MAX: Final = 80
# So small that a few bytes make several chunks; no handshake would agree on it.
_CHUNK_BYTES: Final = 16
_CONTROL: Final = tuple(_BODIES)
_KINDS: Final = {
    frame_type: inspect.type_info(body) for frame_type, body in _BODIES.items()
}
_DIRECTIONS: Final = (Access.READ, Access.WRITE, Access.READWRITE)


def run(data: bytes) -> int:
    """The first byte chooses the trust mode."""
    reader = Reader(data)
    world = _World(TrustMode(reader.byte() & 1))
    for _ in range(_STEPS_MAX):
        if not reader:
            break
        world.step(reader)
    world.finish()
    return world.fed


@functools.cache
def _shaken(trust: TrustMode) -> Shaking:
    parameters = replace(SMALL, eager_bytes=8, window_bytes=32, window_messages=4)
    return shake(
        begin(
            identity("client", trust=trust, parameters=parameters),
            identity("server", trust=trust, parameters=parameters),
        )
    )


def _pair(trust: TrustMode) -> ConnectionPair:
    shaken = copied(_shaken(trust))
    for side in (shaken.client, shaken.server):
        assert side.agreement is not None
        parameters = replace(side.agreement.parameters, chunk_bytes=_CHUNK_BYTES)
        side.agreement = replace(side.agreement, parameters=parameters)
    return ConnectionPair(shaken=shaken)


class _World:
    """A pair, what was asked of it, and the steps that bytes can choose.

    Attributes:
        fed: Bytes of all frames that were forged or delivered.
    """

    def __init__(self, trust: TrustMode) -> None:
        self.fed = 0
        self._pair = _pair(trust)
        self._made_lanes: PairLanes | None = None
        self._begun: list[tuple[Peer, RequestRecord]] = []
        self._grants: dict[Role, list[AccessBody]] = {role: [] for role in Role}
        self._regions: dict[Role, list[RegionRecord]] = {role: [] for role in Role}
        self._steps: tuple[Callable[[Reader, Role], None], ...] = (
            *(self._deliver, self._deliver, self._send, self._recv, self._expose),
            *(self._put, self._get, self._end_request, self._time, self._wire),
            *(self._revoke, self._transfer, self._move_transfer, self._close),
            *(self._forge, self._forge, self._forge_access, self._forge_payload),
            *(self._forge_payload, self._raw, self._half_a_frame, self._damage),
        )

    def step(self, reader: Reader) -> None:
        """Do what the next bytes say, at one of the ends."""
        choice = reader.byte()
        role = Role(choice & 1)
        try:
            self._steps[(choice >> 1) % len(self._steps)](reader, role)
        except (UsageError, ConnectionClosed):
            # Said to an application that asks for what cannot be.
            return

    def finish(self) -> None:
        """Cut the wire: every request has ended, and all memory is free."""
        for role in Role:
            end = self._pair.of(role)
            if not end.lost:
                end.lose()
            if self._made_lanes is not None:
                for half in self._halves(role):
                    self._lanes.end(half)
            assert end.core.closed
            for region in self._regions[role]:
                end.close_region(region)
            assert list(end.core._requests) == []
            assert len(end.core.holds) == 0, "memory that nobody gives back"
        for end, request in self._begun:
            assert request in end.done, "a request without an end"

    # --- what applications do

    def _send(self, reader: Reader, role: Role) -> None:
        end = self._pair.of(role)
        self._note(end, end.send(reader.byte() & 3, reader.take(reader.byte() & 63)))

    def _recv(self, reader: Reader, role: Role) -> None:
        end, size = self._pair.of(role), reader.byte()
        deadline = end.now + size / 16 if size & 64 else None
        tag = reader.byte() & 3
        self._note(end, end.recv(tag, size & 63 or None, deadline=deadline))

    def _expose(self, reader: Reader, role: Role) -> None:
        end = self._pair.of(role)
        region = end.expose(reader.byte() & 127, reader.pick(_DIRECTIONS))
        self._regions[role].append(region)
        self._grants[role.other].append(end.grant(region))

    def _put(self, reader: Reader, role: Role) -> None:
        end, target = self._pair.of(role), self._some_grant(reader, role)
        if target.nbytes <= 128:
            self._note(end, end.put(b"p" * target.nbytes, target))

    def _get(self, reader: Reader, role: Role) -> None:
        end, source = self._pair.of(role), self._some_grant(reader, role)
        if source.nbytes <= 128:
            self._note(end, end.get(source))

    def _some_grant(self, reader: Reader, role: Role) -> AccessBody:
        """One that was given, and perhaps a part of it, or more than it."""
        if not self._grants[role]:
            raise UsageError("there is no grant")
        grant, how = reader.pick(self._grants[role]), reader.byte()
        if how & 1:
            grant = msgspec.structs.replace(
                grant, offset=reader.byte(), nbytes=1 + reader.byte() % 128
            )
        if not grant.nbytes:
            raise UsageError("the front moves no 0 bytes")
        return grant

    def _end_request(self, reader: Reader, role: Role) -> None:
        del role
        if self._begun:
            end, request = reader.pick(self._begun)
            end.cancel(request)

    def _revoke(self, reader: Reader, role: Role) -> None:
        if self._regions[role]:
            self._pair.of(role).revoke(reader.pick(self._regions[role]))

    def _transfer(self, reader: Reader, role: Role) -> None:
        end, priority = self._pair.of(role), reader.byte()
        pull = bool(reader.byte() & 1)
        self._note(end, end.open(priority=priority, pull=pull))

    def _move_transfer(self, reader: Reader, role: Role) -> None:
        """Answer one, mark a segment of one, commit one: what the front may do."""
        end, transfers = self._pair.of(role), self._pair.of(role).core.transfers
        if reader.byte() & 1:
            opened = [event.request for event in end.heard(TransferOpened)]
            if opened and not reader.pick(opened).over:
                request = opened[-1]
                if request in transfers.unanswered:
                    transfers.agree(request, b"yours")
        else:
            moving = [
                request
                for request in end.core._requests
                if request.kind is RequestKind.OUTGOING
                and request.state is RequestStage.MOVING
                and not transfers.records[request].committed
            ]
            if moving and reader.byte() & 3:
                data = b"s" * (1 + reader.byte() % 64)
                end.mark(reader.pick(moving), data)
            elif moving:
                end.commit(reader.pick(moving))
        end.collect()

    def _close(self, reader: Reader, role: Role) -> None:
        self._pair.of(role).close(timeout_s=reader.byte() / 16)

    # --- what time and wires do

    def _deliver(self, reader: Reader, role: Role) -> None:
        for _ in range(1 + (reader.byte() & 7)):
            wire = self._pair.of(role).wire
            if not wire or self._pair.of(role.other).lost:
                return
            self.fed += sum(map(len, wire[0]))
            self._pair.deliver(self._pair.of(role))

    def _time(self, reader: Reader, role: Role) -> None:
        end = self._pair.of(role)
        end.now += reader.byte() / 16
        if not end.core.closed and end.core.next_tick <= end.now:
            end.tick()

    def _wire(self, reader: Reader, role: Role) -> None:
        end, how = self._pair.of(role), reader.byte()
        end.stalled, end.slow = bool(how & 1), bool(how & 2)
        while how & 4 and end._leaving:
            end.complete()
        if how & 8:
            self._beside(reader, role)
        if how == 0xFF and not end.lost:
            end.lose()
        end.collect()

    @property
    def _lanes(self) -> PairLanes:
        """Made when they are asked for: their memory is not the core's."""
        if self._made_lanes is None:
            self._made_lanes = PairLanes(self._pair)
        return self._made_lanes

    def _halves(self, role: Role) -> list[Half]:
        halves = self._lanes.halves.values()
        return [half for half in halves if half.role is role and not half.gone]

    def _beside(self, reader: Reader, role: Role) -> None:
        """A lane is asked for, is used, moves a payload, reports it, or breaks."""
        lanes, halves, how = self._lanes, self._halves(role), reader.byte() % 5
        if how == 0:
            if self._pair.client.core.lanes.next_number() is not None:
                lanes.ask()
            return
        if not halves:
            return
        half = reader.pick(halves)
        done = sorted(half.sending.keys() - half.unread)
        if how == 1 and half.number in self._pair.of(role).core.lanes._lanes:
            stage = self._pair.of(role).core.lanes._lanes[half.number].stage
            lanes.via[role] = half.number if stage is LaneStage.OPEN else 0
        elif how == 2 and (honest := self._honest(half)):
            lanes.move(half, reader.pick(honest), flip=bool(reader.byte() & 1))
        elif how == 3 and done:
            lanes.sent(half, reader.pick(done))
        elif how == 4:
            lanes.end(half)

    def _honest(self, half: Half) -> list[int]:
        """Descriptors that the other end has made, for as many bytes as it has sent."""
        across = self._lanes.halves.get((half.role.other, half.number))
        return [
            descriptor
            for descriptor in self._lanes.movable(half)
            if across is not None
            and descriptor in across.unread
            and across.sending[descriptor].length == half.arriving[descriptor].length
        ]

    # --- what no honest end does

    def _forge(self, reader: Reader, role: Role) -> None:
        frame_type = reader.pick(_CONTROL)
        row = msgspec.msgpack.encode(_fabricated(reader, _KINDS[frame_type]))
        framing = self._pair.of(role).core.outbox.framing
        self._throw(
            role, framing.control(frame_type, row, request=_request_number(reader))
        )

    def _forge_access(self, reader: Reader, role: Role) -> None:
        grant = msgspec.structs.replace(
            self._some_grant(reader, role),
            offset=reader.number() % 2**36,
            nbytes=reader.number() % 2**36,
        )
        verb = FrameType.PUT if reader.byte() & 1 else FrameType.GET
        self._pair.of(role).forge(verb, grant, request=_request_number(reader))
        self._throw(role, self._pair.of(role).wire.pop())

    def _forge_payload(self, reader: Reader, role: Role) -> None:
        end = self._pair.of(role)
        end.forge_payload(
            FrameType.DATA if reader.byte() & 3 else FrameType.MESSAGE,
            reader.take(1 + (reader.byte() & 31)) or b"x",
            request=_request_number(reader),
            segment=reader.byte() & 3,
            offset=(reader.byte() & 15) * _CHUNK_BYTES + (reader.byte() & 1),
        )
        self._throw(role, end.wire.pop())

    def _throw(self, role: Role, frame: tuple[bytes, bytes]) -> None:
        """Put a frame at the end of the wire, behind all that is numbered before it."""
        self.fed += sum(map(len, frame))
        if not self._pair.of(role).lost:
            self._pair.of(role).wire.append(frame)

    def _raw(self, reader: Reader, role: Role) -> None:
        data = reader.short()
        self.fed += len(data)
        if not self._pair.of(role.other).lost:
            self._pair.of(role.other).feed(data)

    def _half_a_frame(self, reader: Reader, role: Role) -> None:
        """Something else happens between a header and its body."""
        end, other = self._pair.of(role), self._pair.of(role.other)
        if not end.wire or other.lost:
            return
        header, body = end.wire.popleft()
        self.fed += len(header) + len(body)
        arrival = other.header(header)
        if arrival is None:
            return
        if reader.byte() & 1:
            self._end_request(reader, role)
        if reader.byte() & 1:
            other.close(timeout_s=1.0)
        other.body(arrival, body)

    def _damage(self, reader: Reader, role: Role) -> None:
        """Payload arrives with other bytes in it."""
        wire = self._pair.of(role).wire
        if wire and wire[0][0][0] >= FrameType.MESSAGE and wire[0][1]:
            header, body = wire[0]
            wire[0] = (header, bytes([body[0] ^ (reader.byte() | 1)]) + body[1:])

    def _note(self, end: Peer, request: RequestRecord | None) -> None:
        if request is not None:
            self._begun.append((end, request))


def _request_number(reader: Reader) -> int:
    """Mostly a small one, which may well be open."""
    return reader.number() % 2**32


def _fabricated(reader: Reader, kind: inspect.Type) -> Any:
    """A value for a field, mostly of its type and not always in its range."""
    match kind:
        case inspect.IntType():
            number = reader.number()
            return number if number < 2**64 else -1
        case inspect.BoolType():
            return bool(reader.byte() & 1)
        case inspect.BytesType(min_length=low):
            return reader.take(low or reader.byte() & 31).ljust(low or 0, b"\0")
        case inspect.StrType():
            return "x" * (reader.byte() & 31)
        case inspect.VarTupleType(item_type=item):
            return [_fabricated(reader, item) for _ in range(reader.byte() & 3)]
        case inspect.TupleType(item_types=items):
            return [_fabricated(reader, item) for item in items]
        case inspect.UnionType(types=types):
            return _fabricated(reader, reader.pick(types))
        case inspect.NoneType():
            return None
        case inspect.StructType(fields=fields):
            return [_fabricated(reader, field.type) for field in fields]
    raise AssertionError(f"no value of {kind}")
