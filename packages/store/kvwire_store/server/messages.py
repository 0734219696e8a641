"""The messages between a store server and its clients, apart from the blocks.

Every request and reply is one kvwire message with the tag :data:`TAG`: a msgspec array
whose first element is its kind, and in which every number has a fixed range. Fields are
identified by position: new ones are added at the end with defaults, and old readers
ignore them. The images of a request's blocks follow one another. They are in the
message itself if they have at most ``STORE_INLINE_BYTES``; otherwise they are in a
separate message, whose tag is derived from the request's number.

=========  =======================  ==================================================
client     server                   notes
=========  =======================  ==================================================
Hello      Welcome                  once, before anything else
Find       Found
Touch      (nothing)
Put        Done                     large images are sent after the request
Get        Done                     large images follow: only those of landed blocks,
                                    and no message if there are none
Flush      Done
Delete     Done
Apply      VerbDone                 the verb's result for each block
Stats      Report
=========  =======================  ==================================================

So a small request takes one round trip: a message that fits the connection's credit is
sent at once. A larger message waits until its receiver has memory for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Final, Self, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvwire.errors import UsageError, sayable, shown
from kvwire.kv.blocks import all_of
from kvwire.kv.spec import KVSpec
from kvwire.limits import KIB, NAME_CHARS_MAX, REASON_CHARS_MAX, REQUEST_BYTES_MAX
from kvwire.spi import DECODE_ERRORS, VersionRange
from kvwire_store.counters import StoreCounters
from kvwire_store.keys import Keys, Orders, as_keys
from kvwire_store.limits import (
    STORE_BERTHS_MAX,
    STORE_CLIENTS_MAX,
    STORE_HASH_BYTES_MAX,
    STORE_INLINE_BYTES,
    STORE_KEYS_MAX,
    STORE_NAMESPACES_TOLD,
    STORE_REASONS_MAX,
    STORE_REQUESTS_MAX,
    STORE_SLAB_BYTES_MAX,
    STORE_TENANTS_MAX,
    STORE_TIMEOUT_S_MAX,
    STORE_TTL_S_MAX,
)
from kvwire_store.namespace import (
    ABSENT,
    DIGEST_BYTES,
    ORDERS,
    UNKNOWN,
    Namespace,
    of_tenant,
)
from kvwire_store.placement import BlockState, Placement, Verb, VerbKind
from kvwire_store.tiers.base import BlockResult, BlockResults, TenantUse, TierStats

TAG: Final = int.from_bytes(b"kv-store", "big")
"""The tag of every message, in both directions."""
VERSIONS: Final[VersionRange] = (1, 1)
"""The versions of these messages that this side speaks."""
_PAYLOADS: Final = 1 << 63

_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
_Text = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
_Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
_KEY_BYTES_MAX: Final = DIGEST_BYTES + STORE_HASH_BYTES_MAX
_Width = Annotated[int, Meta(ge=DIGEST_BYTES + 1, le=_KEY_BYTES_MAX)]
_Joined = Annotated[bytes, Meta(max_length=STORE_KEYS_MAX * _KEY_BYTES_MAX)]
# Read without a copy, as a view of the message.
_Images = Annotated[memoryview, Meta(max_length=STORE_INLINE_BYTES)]
_NO_IMAGES: Final = memoryview(b"")
_Milliseconds = Annotated[int, Meta(ge=1, le=int(STORE_TIMEOUT_S_MAX * 1000))]
# KVSpec has a dozen fields; more may come.
_FIELDS_MAX: Final = 64
# So few keys are compared one by one.
_FEW: Final = 16
# Of a NamespaceText with the longest texts.
_TEXT_BYTES_MAX: Final = 4 * NAME_CHARS_MAX * (2 * _FIELDS_MAX + 2) + 4 * KIB
_TIERS_MAX: Final = 64
_RESULT_MAX: Final = int(max(BlockResult))
_KNOWN_ORDERS: Final = bytes((*range(len(ORDERS)), UNKNOWN, ABSENT))


class StoreMessage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The base of messages and of their parts."""


class Names(StoreMessage, array_like=True, frozen=True, gc=False):
    """Keys of one length, one after the other."""

    width: _Width
    joined: _Joined

    def __post_init__(self) -> None:
        # msgspec reports a ValueError as one of its own.
        count, rest = divmod(len(self.joined), self.width)
        if not count or rest:
            raise ValueError(
                f"{len(self.joined)} bytes are not a whole number of "
                f"{self.width}-byte keys"
            )
        if count > STORE_KEYS_MAX:
            raise ValueError(
                f"{count} keys are too many; the limit is {STORE_KEYS_MAX}"
            )

    def __len__(self) -> int:
        return len(self.joined) // self.width

    @classmethod
    def of(cls, keys: Keys) -> Self:
        """Join keys, 1 to ``STORE_KEYS_MAX``, all of one length."""
        return cls(len(keys[0]), b"".join(keys.tolist()))

    def keys_of(self, tenant: str) -> Keys:
        """Return the keys of a tenant's blocks in a store with tenants."""
        if not tenant:
            width = self.width
            end = len(self.joined)
            if end == width:
                return np.array((self.joined,), np.object_)
            return as_keys(np.frombuffer(self.joined, f"V{width}").tolist())
        table = np.frombuffer(self.joined, np.uint8).reshape(-1, self.width).copy()
        digests = (
            table[:, :DIGEST_BYTES].copy().view(f"V{DIGEST_BYTES}").ravel().tolist()
        )
        own = {digest: of_tenant(digest, tenant) for digest in set(digests)}
        rows = np.frombuffer(b"".join(map(own.__getitem__, digests)), np.uint8)
        table[:, :DIGEST_BYTES] = rows.reshape(-1, DIGEST_BYTES)
        return as_keys(table.view(f"V{self.width}").ravel().tolist())

    def all_in(self, namespace: Namespace) -> bool:
        """Return whether every key belongs to one namespace."""
        if not self.joined.startswith(namespace.digest):
            return False
        width = self.width
        end = len(self.joined)
        if end == width:
            return True
        if end <= _FEW * width:  # without arrays, which take several times as long
            starts = range(width, end, width)
            found = [self.joined.startswith(namespace.digest, at) for at in starts]
            return all(found)
        table = np.frombuffer(self.joined, np.uint8).reshape(-1, self.width)
        digest = np.frombuffer(namespace.digest, np.uint8)
        return bool(all_of(table[:, :DIGEST_BYTES] == digest, axis=None))


class NamespaceText(StoreMessage, array_like=True, frozen=True, gc=False):
    """A namespace in full; see :mod:`kvwire_store.namespace`."""

    group: _Name
    fields: Annotated[tuple[tuple[_Name, _Text], ...], Meta(max_length=_FIELDS_MAX)]
    tenant: _Text = ""


# Each request names a namespace, and mostly the same one: it is encoded and decoded
# once. Bounded like the namespaces that a peer may describe.
@lru_cache(STORE_NAMESPACES_TOLD)
def text_of(namespace: Namespace) -> msgspec.Raw:
    """Return a namespace in full, as requests name it."""
    fields = namespace.spec.to_pairs()
    text = NamespaceText(namespace.group, fields, namespace.tenant)
    return msgspec.Raw(msgspec.msgpack.encode(text))


def namespace_in(text: msgspec.Raw, tenant: str = "") -> Namespace:
    """Return the namespace in a request, for its client or for a tenant.

    Raises:
        UsageError: It is no namespace that is known here.
    """
    told = bytes(text)
    if len(told) > _TEXT_BYTES_MAX:
        raise UsageError(f"not a request: its namespace has {len(told)} bytes")
    return _namespace_in(told, tenant)


@lru_cache(STORE_NAMESPACES_TOLD)
def _namespace_in(text: bytes, tenant: str) -> Namespace:
    try:
        decoded = _texts.decode(text)
    except DECODE_ERRORS as exc:
        raise UsageError(f"not a request: {shown(str(exc))}") from None
    return namespace_told(decoded, tenant)


@lru_cache(STORE_NAMESPACES_TOLD)
def namespace_told(text: NamespaceText, tenant: str = "") -> Namespace:
    """Return the namespace in a welcome, or for a tenant."""
    return Namespace(text.group, KVSpec.from_pairs(text.fields), tenant or text.tenant)


# --- from the client ------------------------------------------------------------------


class ClientMessage(StoreMessage, array_like=True, frozen=True, gc=False):
    """The base of a client's messages."""


class StoreHello(ClientMessage, array_like=True, frozen=True, gc=False, tag=1):
    """Begins the conversation, with the client's lowest and highest version."""

    version_min: _Number
    version_max: _Number


class NumberedRequest(ClientMessage, array_like=True, frozen=True, gc=False):
    """The base of requests that get an answer, with the same number."""

    number: _Number


class Find(NumberedRequest, array_like=True, frozen=True, gc=False, tag=2):
    """Finds out which of these blocks the server has.

    Attributes:
        names: Their keys.
        kept: Whether blocks only in memory do not count, if the server has lower tiers
            and writes through. Older servers ignore this field.
    """

    names: Names
    kept: bool = False


class Touch(ClientMessage, array_like=True, frozen=True, gc=False, tag=3):
    """Reports that these blocks were used elsewhere, or read in place.

    Attributes:
        names: Their keys, the last used one first.
        read_blocks: The number of blocks read in place since the last report.
        read_bytes: The bytes of these blocks.
    """

    names: Names
    read_blocks: _Number = 0
    read_bytes: _Number = 0


class TransferMessage(NumberedRequest, array_like=True, frozen=True, gc=False):
    """The base of a put and a get; ``namespace`` is a :class:`NamespaceText`."""

    namespace: msgspec.Raw
    names: Names
    timeout_ms: _Milliseconds


class Put(TransferMessage, array_like=True, frozen=True, gc=False, tag=4):
    """Requests to keep these blocks, whose images all have one order."""

    order: Annotated[int, Meta(ge=0, lt=len(ORDERS))]
    images: _Images = _NO_IMAGES


class Get(TransferMessage, array_like=True, frozen=True, gc=False, tag=5):
    """Requests these blocks."""


class Flush(NumberedRequest, array_like=True, frozen=True, gc=False, tag=6):
    """Requests an answer once all blocks put so far survive a power cut."""


class Stats(NumberedRequest, array_like=True, frozen=True, gc=False, tag=7):
    """Requests a report of the tiers, clients and counts."""


class Delete(NumberedRequest, array_like=True, frozen=True, gc=False, tag=8):
    """Requests to delete these blocks, or all blocks of a namespace or of a tenant.

    Attributes:
        names: Their keys; None for all blocks of the namespace.
        digest: The digest of a namespace; empty, and without names, for all blocks of
            the tenant.
        tenant: The tenant, if the operator sends it; "" for the client's own tenant.
    """

    names: Names | None
    digest: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""
    tenant: _Text = ""

    def __post_init__(self) -> None:
        if len(self.digest) not in (0, DIGEST_BYTES):
            raise ValueError("the digest has the wrong length for a namespace")


class Apply(NumberedRequest, array_like=True, frozen=True, gc=False, tag=9):
    """Requests a verb for these blocks.

    Attributes:
        verb: The verb, a :class:`~kvwire_store.placement.VerbKind`.
        names: Their keys.
        namespace: Their namespace, a :class:`NamespaceText`.
        ttl_ms: How long a pin lasts; 0 for ever.
    """

    verb: Annotated[int, Meta(ge=0, le=int(max(VerbKind)))]
    names: Names
    namespace: msgspec.Raw
    ttl_ms: Annotated[int, Meta(ge=0, le=int(STORE_TTL_S_MAX * 1000))] = 0

    @classmethod
    def of(cls, number: int, verb: Verb, names: Names, namespace: msgspec.Raw) -> Self:
        """Make the request of a verb; a prefetch goes into the server's memory."""
        milliseconds = max(1, round(verb.ttl_s * 1000)) if verb.ttl_s else 0
        return cls(number, int(verb.kind), names, namespace, milliseconds)

    @property
    def asked(self) -> Verb:
        """Return the verb."""
        return Verb(VerbKind(self.verb), ttl_s=self.ttl_ms / 1000)


# --- from the server ------------------------------------------------------------------


class ServerMessage(StoreMessage, array_like=True, frozen=True, gc=False):
    """The base of a server's messages."""


class Welcome(ServerMessage, array_like=True, frozen=True, gc=False, tag=1):
    """Answers :class:`StoreHello`.

    Attributes:
        version: The highest version that both sides support; if there is none, the
            server's highest.
        durable: Whether stored blocks survive a restart of the server.
        read_only: Whether it accepts no blocks.
        requests: How many requests one client may have open.
        berths: How many of these requests move blocks at once.
        berth_bytes: How many bytes of blocks one request may move.
        namespaces: The namespaces of its blocks.
        slab_bytes: Bytes of a slab of its memory, which clients on its host may read in
            place; 0 if they may not.
        alone: Whether it has blocks in memory only.
    """

    version: _Number
    durable: bool = False
    read_only: bool = False
    requests: Annotated[int, Meta(ge=1, le=STORE_REQUESTS_MAX)] = 1
    berths: Annotated[int, Meta(ge=1, le=STORE_BERTHS_MAX)] = 1
    berth_bytes: Annotated[int, Meta(ge=1, le=REQUEST_BYTES_MAX)] = 1
    namespaces: Annotated[
        tuple[NamespaceText, ...], Meta(max_length=STORE_NAMESPACES_TOLD)
    ] = ()
    slab_bytes: Annotated[int, Meta(ge=0, le=STORE_SLAB_BYTES_MAX)] = 0
    alone: bool = False


class NumberedReply(ServerMessage, array_like=True, frozen=True, gc=False):
    """The base of replies to the request of the same number."""

    number: _Number


class Found(NumberedReply, array_like=True, frozen=True, gc=False, tag=2):
    """Contains the order of each block's image, one byte each, or ``ABSENT``."""

    orders: Annotated[bytes, Meta(max_length=STORE_KEYS_MAX)]

    def __post_init__(self) -> None:
        if self.orders.translate(None, _KNOWN_ORDERS):
            raise ValueError("an unknown order")

    @property
    def table(self) -> Orders:
        """Return the orders."""
        return np.frombuffer(self.orders, np.uint8)


class StoreDone(NumberedReply, array_like=True, frozen=True, gc=False, tag=3):
    """Contains each block's result, one byte each, and the reason for failures."""

    results: Annotated[bytes, Meta(max_length=STORE_KEYS_MAX)] = b""
    reason: _Reason = ""
    # For a get: the order of each image.
    orders: Annotated[bytes, Meta(max_length=STORE_KEYS_MAX)] = b""
    # For a get of few bytes: the images of the blocks that landed.
    images: _Images = _NO_IMAGES
    # For a delete of all of a tenant's blocks: their number.
    deleted: _Number = 0
    # Of a get, a byte for each block: 0 if a Find with ``kept`` would not count it.
    # Empty if it would count all of them.
    kept: Annotated[bytes, Meta(max_length=STORE_KEYS_MAX)] = b""

    def __post_init__(self) -> None:
        if self.kept and max(self.kept) > 1:
            raise ValueError("a mark that is neither 0 nor 1")
        if self.results and max(self.results) > _RESULT_MAX:
            raise ValueError("an unknown block result")
        if self.orders.translate(None, _KNOWN_ORDERS):
            raise ValueError("an unknown order")

    @classmethod
    def of(
        cls,
        number: int,
        results: BlockResults,
        reason: str = "",
        orders: bytes = b"",
        images: memoryview = _NO_IMAGES,
        kept: bytes = b"",
    ) -> Self:
        """Make the reply, with the reason cut to its maximal length."""
        reason = sayable(reason)
        return cls(number, results.tobytes(), reason, orders, images, 0, kept)

    @property
    def table(self) -> BlockResults:
        """Return the results."""
        return np.frombuffer(self.results, np.uint8)


class VerbDone(NumberedReply, array_like=True, frozen=True, gc=False, tag=5):
    """Contains a verb's result for each block.

    Attributes:
        states: The state of each block, a byte each.
        codes: For each block the position of its reason, plus 1; 0 for none.
        reasons: The reasons.
        reason: Why nothing was done at all; empty if anything was done.
    """

    states: Annotated[bytes, Meta(max_length=STORE_KEYS_MAX)] = b""
    codes: Annotated[bytes, Meta(max_length=STORE_KEYS_MAX)] = b""
    reasons: Annotated[tuple[_Reason, ...], Meta(max_length=STORE_REASONS_MAX)] = ()
    reason: _Reason = ""

    def __post_init__(self) -> None:
        if max(self.states, default=0) > max(BlockState):
            raise ValueError("an unknown block state")
        if max(self.codes, default=0) > len(self.reasons):
            raise ValueError("an unknown reason")
        if len(self.states) != len(self.codes):
            raise ValueError("the lists differ in length")

    @classmethod
    def of(cls, number: int, placement: Placement) -> Self:
        """Make the reply, with texts cut to their maximal lengths."""
        codes = placement.codes.copy()
        codes[codes > STORE_REASONS_MAX] = 0
        return cls(
            number,
            placement.states.tobytes(),
            codes.astype(np.uint8).tobytes(),
            tuple(map(sayable, placement.reasons[:STORE_REASONS_MAX])),
        )

    @property
    def placement(self) -> Placement:
        """Return the blocks' states."""
        return Placement(
            states=np.frombuffer(self.states, np.uint8),
            reasons=self.reasons,
            codes=np.frombuffer(self.codes, np.uint8).astype(np.uint16),
        )


class TierRow(StoreMessage, array_like=True, frozen=True, gc=False):
    """Describes one tier of a server."""

    name: _Text
    error: _Reason
    stats: TierStats


class ClientRow(StoreMessage, array_like=True, frozen=True, gc=False):
    """Describes one client of a server."""

    name: _Text
    address: _Text
    requests: _Number
    asked: _Number
    read_bytes: _Number
    written_bytes: _Number
    tenant: _Text = ""


class TenantRow(StoreMessage, array_like=True, frozen=True, gc=False):
    """Describes one tenant of a server."""

    name: _Text
    counters: StoreCounters
    tiers: Annotated[tuple[tuple[_Text, TenantUse], ...], Meta(max_length=_TIERS_MAX)]


class StatsReport(NumberedReply, array_like=True, frozen=True, gc=False, tag=4):
    """A server's report: its tiers, clients and counts."""

    name: _Text
    read_only: bool
    tiers: Annotated[tuple[TierRow, ...], Meta(max_length=_TIERS_MAX)]
    clients: Annotated[tuple[ClientRow, ...], Meta(max_length=STORE_CLIENTS_MAX)]
    dropped: _Number
    """The number of clients that were disconnected for breaking a rule."""
    tenants: Annotated[
        tuple[TenantRow, ...], Meta(max_length=STORE_TENANTS_MAX + 1)
    ] = ()


AnyRequest = StoreHello | Find | Touch | Put | Get | Flush | Stats | Delete | Apply
AnyReply = Welcome | Found | StoreDone | StatsReport | VerbDone
AnswerT = TypeVar("AnswerT", bound=NumberedReply)

encode: Final[Callable[[ClientMessage | ServerMessage], bytes]] = (
    msgspec.msgpack.Encoder().encode
)
"""Returns a message as bytes."""
_requests: Final[msgspec.msgpack.Decoder[AnyRequest]] = msgspec.msgpack.Decoder(
    AnyRequest
)
_texts: Final = msgspec.msgpack.Decoder(NamespaceText)
_replies: Final[msgspec.msgpack.Decoder[AnyReply]] = msgspec.msgpack.Decoder(AnyReply)


def payload_tag(number: int) -> int:
    """Return the tag of a request's blocks."""
    return _PAYLOADS | number


def decode_request(body: bytes | bytearray | memoryview) -> AnyRequest:
    """Decode a message from a client."""
    try:
        return _requests.decode(body)
    except DECODE_ERRORS as exc:
        raise UsageError(f"not a request: {shown(str(exc))}") from None


def decode_reply(body: bytes | bytearray | memoryview) -> AnyReply:
    """Decode a message from a server."""
    try:
        return _replies.decode(body)
    except DECODE_ERRORS as exc:
        raise UsageError(f"not a reply: {shown(str(exc))}") from None
