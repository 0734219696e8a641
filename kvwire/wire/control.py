"""The bodies of control frames: msgspec arrays, with a declared range for every number.

A body has no type tag, because the frame's header has the type, and also the request's
number. Fields are identified by position: a minor version adds fields at the end, with
defaults, and readers skip the fields that they do not know. No field is a view of the
receive buffer, and no field can hold a container with unknown element types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from kvwire.errors import MalformedFrame
from kvwire.limits import (
    BACKENDS_MAX,
    BOOTSTRAP_BYTES_MAX,
    CHUNK_BYTES_MAX,
    DESCRIPTION_BYTES_MAX,
    DESCRIPTOR_BYTES_MAX,
    EAGER_WINDOW_BYTES_MAX,
    KV_GROUPS_MAX,
    LANDED_MAX,
    LANE_NUMBER_MAX,
    LANE_PAYLOADS_MAX,
    LAST_FINS_MAX,
    NAME_CHARS_MAX,
    PRIORITY_MAX,
    PROFILE_FIELDS_MAX,
    REASON_CHARS_MAX,
    REQUEST_BYTES_MAX,
    SEGMENTS_MAX,
    SETTLED_MAX,
    TRANSFER_ID_BYTES_MAX,
    WINDOW_ACCESS_BYTES_MAX,
    WINDOW_DATA_BYTES_MAX,
    WINDOW_GEOMETRY_BYTES_MAX,
    WINDOW_GET_BLOCKS_MAX,
    WINDOW_MEMORY_BYTES_MAX,
    WINDOW_VIEWS_MAX,
)
from kvwire.wire.header import FrameType

U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
# Up to 2**63 - 1, because the transports count in signed 64 bits.
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# Any 8 bytes: a tag may use all 64 bits, and msgspec cannot check numbers above 2**63 -
# 1.
Tag8 = Annotated[bytes, Meta(min_length=8, max_length=8)]
Bytes = Annotated[int, Meta(ge=0, le=REQUEST_BYTES_MAX)]
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Pairs = Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=PROFILE_FIELDS_MAX)]
# The form of ``kvwire.kv.geometry.Geometry.encoded``, which checks the values.
GeometryFields = Annotated[
    tuple[tuple[Name, Pairs, Name, U32, U32 | None], ...],
    Meta(max_length=KV_GROUPS_MAX),
]
Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Bootstrap = Annotated[bytes, Meta(max_length=BOOTSTRAP_BYTES_MAX)]
Descriptor = Annotated[bytes, Meta(max_length=DESCRIPTOR_BYTES_MAX)]
LaneNumber = Annotated[int, Meta(ge=1, le=LANE_NUMBER_MAX)]
TransferId = Annotated[bytes, Meta(min_length=1, max_length=TRANSFER_ID_BYTES_MAX)]
Description = Annotated[bytes, Meta(max_length=DESCRIPTION_BYTES_MAX)]
LastFins = Annotated[tuple[U32, ...], Meta(max_length=LAST_FINS_MAX)]
SegmentNumber = Annotated[int, Meta(ge=1, le=SEGMENTS_MAX)]
WindowNumber = Annotated[int, Meta(ge=1, le=2**31)]
WindowGeometry = Annotated[bytes, Meta(max_length=WINDOW_GEOMETRY_BYTES_MAX)]
WindowMemory = Annotated[bytes, Meta(max_length=WINDOW_MEMORY_BYTES_MAX)]
WindowAccess = Annotated[bytes, Meta(max_length=WINDOW_ACCESS_BYTES_MAX)]
ViewNumber = Annotated[int, Meta(ge=0, le=WINDOW_VIEWS_MAX - 1)]


class Body(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The base of control bodies; each subclass belongs to one frame type."""


class BackendOffer(Body, array_like=True, frozen=True, gc=False):
    """One transport that a side offers."""

    name: Name
    api_version: U16


class TransportOffer(Body, array_like=True, frozen=True, gc=False):
    """OFFER: the client's name, its transports by preference, and its profile.

    ``resumes`` is the digest of the connection that this one replaces, or empty.
    """

    name: Name
    backends: Annotated[tuple[BackendOffer, ...], Meta(max_length=BACKENDS_MAX)]
    profile: Annotated[
        tuple[tuple[Name, Name], ...], Meta(max_length=PROFILE_FIELDS_MAX)
    ]
    resumes: Annotated[bytes, Meta(max_length=16)] = b""


class HandshakeVerdict(Body, array_like=True, frozen=True, gc=False):
    """The server's decision about one transport.

    If the chosen transport cannot be opened, the next ``possible`` one in the list is
    tried.
    """

    name: Name
    taken: bool
    reason: Reason
    possible: bool = False


class TransportChoice(Body, array_like=True, frozen=True, gc=False):
    """CHOICE: the server's name, verdicts and profile; at most one is taken."""

    name: Name
    verdicts: Annotated[tuple[HandshakeVerdict, ...], Meta(max_length=2 * BACKENDS_MAX)]
    profile: Annotated[
        tuple[tuple[Name, Name], ...], Meta(max_length=PROFILE_FIELDS_MAX)
    ]


class Ping(Body, array_like=True, frozen=True, gc=False):
    """PING and PONG: a number, which PONG repeats."""

    number: U32


class Close(Body, array_like=True, frozen=True, gc=False):
    """CLOSE: the sender starts nothing new, and has finished all that it had begun."""

    code: U16


class Credit(Body, array_like=True, frozen=True, gc=False):
    """CREDIT: the number of further eager messages and bytes that may be sent."""

    messages: Annotated[int, Meta(ge=1, le=2**20)]
    nbytes: Annotated[int, Meta(ge=0, le=EAGER_WINDOW_BYTES_MAX)]


class LaneOpen(Body, array_like=True, frozen=True, gc=False):
    """LANE_OPEN: requests a lane, or answers; has the bootstrap of an endpoint."""

    lane: LaneNumber
    backend: Name
    bootstrap: Bootstrap


class LaneReady(Body, array_like=True, frozen=True, gc=False):
    """LANE_READY: the lane is open on both sides; lane 0 ends the initial set."""

    lane: Annotated[int, Meta(ge=0, le=LANE_NUMBER_MAX)]


class LaneClose(Body, array_like=True, frozen=True, gc=False):
    """LANE_CLOSE: the sender's endpoint of a lane has ended, or never began.

    The sender has received ``seen`` announcements for this lane. Of these payloads, the
    ones numbered in ``missed`` have not arrived, and all others have.
    """

    lane: LaneNumber
    reason: Reason
    seen: U63
    missed: Annotated[tuple[U63, ...], Meta(max_length=LANE_PAYLOADS_MAX)]


class LaneAck(Body, array_like=True, frozen=True, gc=False):
    """LANE_ACK: the first ``count`` payloads of a lane have arrived."""

    lane: LaneNumber
    count: U63


class LaneData(Body, array_like=True, frozen=True, gc=False):
    """LANE_DATA: announces a chunk whose payload travels on a lane."""

    lane: LaneNumber
    segment: U32
    offset: Bytes
    nbytes: Annotated[int, Meta(ge=1, le=CHUNK_BYTES_MAX)]
    check: U32 | None
    descriptor: Descriptor


class Announce(Body, array_like=True, frozen=True, gc=False):
    """ANNOUNCE: the tag and size of a message, which waits for READY."""

    tag: Tag8
    nbytes: Bytes


class Ready(Body, array_like=True, frozen=True, gc=False):
    """READY: the receiver of an announced message has memory for all of it."""

    nbytes: Bytes


class AccessBody(Body, array_like=True, frozen=True, gc=False):
    """PUT and GET: a byte range of a grant, and the token that proves the grant."""

    grant: U63
    generation: U63
    token: Token
    offset: Bytes
    nbytes: Bytes


class WindowOpen(Body, array_like=True, frozen=True, gc=False):
    """WINDOW_OPEN: requests one of the peer's windows by its name."""

    name: Name


class WindowOpened(Body, array_like=True, frozen=True, gc=False):
    """WINDOW_OPENED: the answer, with the window's number on this connection.

    ``serial`` is part of each of its tickets; ``geometry`` describes its cache. If an
    open lane can read the window in place, the next fields are as in WINDOW_MEMORY;
    otherwise ``lane`` is 0. ``together`` is the largest get that one WINDOW_DATA
    answers, in bytes.
    """

    window: WindowNumber
    serial: Token
    geometry: WindowGeometry
    lane: Annotated[int, Meta(ge=0, le=LANE_NUMBER_MAX)] = 0
    memory: WindowMemory = b""
    access: WindowAccess = b""
    together: Annotated[int, Meta(ge=0, le=WINDOW_DATA_BYTES_MAX)] = 0


class WindowMemoryBody(Body, array_like=True, frozen=True, gc=False):
    """WINDOW_MEMORY: a new lane can read an open window in place.

    ``memory`` has the addresses, and ``access`` the lane's own data for reading them.
    """

    window: WindowNumber
    lane: LaneNumber
    memory: WindowMemory
    access: WindowAccess


class WindowViewBody(Body, array_like=True, frozen=True, gc=False):
    """WINDOW_VIEW: the geometry of the cache into which this reader's gets go."""

    window: WindowNumber
    view: ViewNumber
    geometry: WindowGeometry


class WindowGet(Body, array_like=True, frozen=True, gc=False):
    """WINDOW_GET: requests blocks, whose ``nbytes`` bytes follow as DATA.

    With ``together``, they follow as one WINDOW_DATA instead.

    ``entries`` has the blocks' places in the window's table, 4 bytes each, and
    ``generations`` their generations, 8 bytes each. ``counts`` has the number of blocks
    per group.
    """

    window: WindowNumber
    view: ViewNumber
    nbytes: Annotated[int, Meta(ge=1, le=REQUEST_BYTES_MAX)]
    counts: Annotated[tuple[U32, ...], Meta(min_length=1, max_length=KV_GROUPS_MAX)]
    entries: Annotated[bytes, Meta(min_length=4, max_length=4 * WINDOW_GET_BLOCKS_MAX)]
    generations: Annotated[
        bytes, Meta(min_length=8, max_length=8 * WINDOW_GET_BLOCKS_MAX)
    ]
    together: bool = False


class WindowGot(Body, array_like=True, frozen=True, gc=False):
    """WINDOW_GOT: the last frame of an answer, sent after generations were compared.

    ``stale`` has one bit per block, least significant first; a set bit means that the
    block's generation has changed. ``stale`` is empty if no generation has. If ``sent``
    is false, no bytes were sent, because all blocks are stale.
    """

    sent: bool
    stale: Annotated[bytes, Meta(max_length=WINDOW_GET_BLOCKS_MAX // 8)] = b""


class WindowClose(Body, array_like=True, frozen=True, gc=False):
    """WINDOW_CLOSE: the owner or the reader of a window ends it.

    A reader answers the owner's WINDOW_CLOSE with its own, as soon as its lanes no
    longer read the window's memory. ``mine`` is true if the sender is the owner.
    """

    window: WindowNumber
    mine: bool


class Fin(Body, array_like=True, frozen=True, gc=False):
    """FIN: every byte of a put is in place, or a producer has received COMMIT_ACK."""

    nbytes: Bytes


class Fail(Body, array_like=True, frozen=True, gc=False):
    """FAIL: the sender has ended this request, which is over on both sides."""

    code: U16
    reason: Reason


class Open(Body, array_like=True, frozen=True, gc=False):
    """OPEN: requests a KV transfer by the name that both applications use.

    ``done`` has the request numbers of other transfers; for each of them this frame
    counts as a FIN.
    """

    id: TransferId
    pull: bool
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)]
    description: Description
    done: LastFins = ()


class Agree(Body, array_like=True, frozen=True, gc=False):
    """AGREE: the answer to OPEN; ``done`` is as in OPEN."""

    description: Description
    done: LastFins = ()


class SegmentBody(Body, array_like=True, frozen=True, gc=False):
    """SEGMENT: marks a segment; its box is (group, layer, layers, granule, granules).

    With ``commit`` 1 it is also a COMMIT, and with 2 a complete COMMIT.
    """

    number: Annotated[int, Meta(ge=1, le=SEGMENTS_MAX)]
    box: tuple[U32, U32, U32, U32, U32]
    nbytes: Annotated[int, Meta(ge=1, le=REQUEST_BYTES_MAX)]
    commit: Annotated[int, Meta(ge=0, le=2)] = 0


class SegmentAck(Body, array_like=True, frozen=True, gc=False):
    """SEGMENT_ACK: these segments have arrived completely and were verified."""

    segments: Annotated[
        tuple[SegmentNumber, ...], Meta(min_length=1, max_length=LANDED_MAX)
    ]


class Commit(Body, array_like=True, frozen=True, gc=False):
    """COMMIT: the number of marked segments; ``complete`` if nothing is left out."""

    segments: Annotated[int, Meta(ge=0, le=SEGMENTS_MAX)]
    complete: bool


class CommitAck(Body, array_like=True, frozen=True, gc=False):
    """COMMIT_ACK: every segment has landed, except the damaged ones listed here."""

    damaged: Annotated[tuple[SegmentNumber, ...], Meta(max_length=SETTLED_MAX)]


_BODIES: Final[dict[int, type[Body]]] = {
    FrameType.OFFER: TransportOffer,
    FrameType.CHOICE: TransportChoice,
    FrameType.PING: Ping,
    FrameType.PONG: Ping,
    FrameType.CLOSE: Close,
    FrameType.CREDIT: Credit,
    FrameType.LANE_OPEN: LaneOpen,
    FrameType.LANE_READY: LaneReady,
    FrameType.LANE_CLOSE: LaneClose,
    FrameType.LANE_ACK: LaneAck,
    FrameType.ANNOUNCE: Announce,
    FrameType.READY: Ready,
    FrameType.PUT: AccessBody,
    FrameType.GET: AccessBody,
    FrameType.FIN: Fin,
    FrameType.FAIL: Fail,
    FrameType.LANE_DATA: LaneData,
    FrameType.WINDOW_OPEN: WindowOpen,
    FrameType.WINDOW_OPENED: WindowOpened,
    FrameType.WINDOW_MEMORY: WindowMemoryBody,
    FrameType.WINDOW_VIEW: WindowViewBody,
    FrameType.WINDOW_GET: WindowGet,
    FrameType.WINDOW_GOT: WindowGot,
    FrameType.WINDOW_CLOSE: WindowClose,
    FrameType.OPEN: Open,
    FrameType.AGREE: Agree,
    FrameType.SEGMENT: SegmentBody,
    FrameType.SEGMENT_ACK: SegmentAck,
    FrameType.COMMIT: Commit,
    FrameType.COMMIT_ACK: CommitAck,
}
_DECODERS: Final = {
    frame_type: msgspec.msgpack.Decoder(cls) for frame_type, cls in _BODIES.items()
}
# msgspec raises Python's own errors for text that is not UTF-8 and for nesting deeper
# than the stack, even in fields that this version does not know.
DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""The exceptions of msgspec for bytes that it cannot decode."""
encode_body: Final[Callable[[Body], bytes]] = msgspec.msgpack.Encoder().encode
"""Encodes a control body."""

B = TypeVar("B", bound=Body)


def decode_body(frame_type: int, data: bytes | bytearray | memoryview) -> Body:
    """Decode the body of a control frame of this type."""
    try:
        return _DECODERS[frame_type].decode(data)
    except DECODE_ERRORS as exc:
        name = FrameType(frame_type).name
        raise MalformedFrame("KVW-CT-01", f"{name} body: {exc}") from None


def narrowed(body: Body, cls: type[B]) -> B:
    """Return a body as the given type, after asserting that it has this type."""
    assert isinstance(body, cls), (body, cls)
    return body
