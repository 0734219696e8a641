"""The handshake, both roles, as a state machine without I/O.

::

    client                              server
      HELLO   versions, parameters, nonce ->            256 bytes
              <- ACCEPT  version, parameters, nonce, proof over HELLO and ACCEPT
      CONFIRM proof over HELLO, ACCEPT ->
      OFFER   name, transports, profile ->         first body of unknown length
              <- CHOICE  name, verdict per transport, profile

No data of unknown length is read before the peer has authenticated, and ACCEPT is never
longer than HELLO. Both proofs cover all frames so far, so a changed version, mode or
limit is detected. A side that disagrees before the proofs sends REFUSE with a code and
stops; the receiver makes the error text from the code. A server that disagrees with an
OFFER answers with a CHOICE without a transport, but with the server's profile, so that
both sides can name the differing fields.

The front chooses the transport: it reads :attr:`ServerHandshake.offer` and calls
:meth:`ServerHandshake.choose`.
"""

from __future__ import annotations

import enum
import hmac
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvwire.errors import (
    AuthenticationFailed,
    HandshakeError,
    ProfileMismatch,
    ProtocolError,
    UnexpectedFrame,
    VersionMismatch,
    WireCode,
    error_from_code,
    shown,
)
from kvwire.limits import KEY_ID_BYTES
from kvwire.proto.auth import Keys, transcript_hash
from kvwire.proto.framing import Framing
from kvwire.types import PeerInfo, Role, TrustMode
from kvwire.wire.control import (
    TransportChoice,
    TransportOffer,
    decode_body,
    encode_body,
    narrowed,
)
from kvwire.wire.handshake_messages import (
    MAC_BYTES,
    Accept,
    Confirm,
    ConnectionParameters,
    Hello,
    Refuse,
    VersionRange,
    common_version,
    key_id,
    version_mismatch,
)
from kvwire.wire.header import FrameType, Header

# SHA-256 of two certificates, the client's and the server's.
BINDING_BYTES: Final = 64

# The protocol version; later minor versions add to it through ``features``.
VERSIONS: Final[VersionRange] = (1, 1)
# The field named in the error when a client has dialled itself.
OWN_INCARNATION: Final = "incarnation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This side's identity, keys and limits for a handshake.

    Attributes:
        name: This side's name, as shown to the peer.
        incarnation: 16 random bytes, new for each start of the process.
        trust: How each side proves its identity.
        psk: The key with which this side connects; empty except in psk mode.
        keys: All keys that this side accepts, by their ids.
        parameters: This side's limits.
        profile: (field, value) pairs; if both sides name a field, its values must be
            equal.
        versions: The lowest and the highest supported version of the protocol.
    """

    name: str
    incarnation: bytes
    trust: TrustMode
    parameters: ConnectionParameters
    psk: bytes = field(default=b"", repr=False)
    keys: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)
    profile: tuple[tuple[str, str], ...] = ()
    versions: VersionRange = VERSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The result of a successful handshake.

    Attributes:
        role: The role of this side.
        digest: 32 bytes over HELLO and ACCEPT; identifies the connection.
        keys: The connection's keys.
        parameters: The smaller limits of both sides, and their common features.
        peer_parameters: The peer's limits; its windows bound the eager messages to it.
        peer: The peer's name, incarnation and identity.
        choice: The verdict on each transport.
        offer: The client's OFFER.
    """

    role: Role
    digest: bytes = field(repr=False)
    keys: Keys
    parameters: ConnectionParameters
    peer_parameters: ConnectionParameters
    peer: PeerInfo
    choice: TransportChoice
    offer: TransportOffer


class HandshakeState(enum.Enum):
    """The frame or decision for which a handshake waits."""

    HELLO = FrameType.HELLO
    ACCEPT = FrameType.ACCEPT
    CONFIRM = FrameType.CONFIRM
    OFFER = FrameType.OFFER
    CHOICE = FrameType.CHOICE
    DECISION = "decision"
    """Waits for the front; no frame is due."""
    DONE = "done"
    FAILED = "failed"


# The next state, once the expected frame was accepted. REFUSE is allowed whenever a
# frame is due and leads to FAILED; every other frame is an error.
TRANSITIONS: Final[dict[tuple[Role, HandshakeState], HandshakeState]] = {
    (Role.CLIENT, HandshakeState.ACCEPT): HandshakeState.CHOICE,
    (Role.CLIENT, HandshakeState.CHOICE): HandshakeState.DONE,
    (Role.SERVER, HandshakeState.HELLO): HandshakeState.CONFIRM,
    (Role.SERVER, HandshakeState.CONFIRM): HandshakeState.OFFER,
    (Role.SERVER, HandshakeState.OFFER): HandshakeState.DECISION,
    (Role.SERVER, HandshakeState.DECISION): HandshakeState.DONE,
}


class Handshake(ABC):
    """Runs one side of a handshake; the base of both roles.

    Call :meth:`header_received` and :meth:`body_received` in turn, send the frames in
    :attr:`outgoing`, and stop when a call raises or :attr:`agreement` is set.

    Attributes:
        identity: The name, keys and limits of this side.
        outgoing: (header, body) of frames to send, oldest first; the caller empties it.
        agreement: The result; None until the handshake has succeeded.
    """

    role: Role

    def __init__(self, identity: Identity, nonce: bytes, state: HandshakeState) -> None:
        self.framing: Framing = Framing()
        self.outgoing: list[tuple[bytes, bytes]] = []
        self.agreement: Agreement | None = None
        self.state: HandshakeState = state
        self.identity = identity
        self._nonce = nonce
        # The key for the proofs, once it is known.
        self._secret = identity.psk
        self._digest = b""
        self._keys: Keys | None = None
        self._header: Header | None = None
        self._raw_header = b""

    def bind(self, binding: bytes) -> None:
        """Bind the handshake to its TLS connection (``mtls``).

        Call it before the first frame is received, and only if TLS has proved an
        identity that this side accepts. Without this call every peer is refused.

        Args:
            binding: The SHA-256 of the client's certificate, then the server's.
        """
        assert self.identity.trust is TrustMode.MTLS, "only TLS has certificates"
        assert len(binding) == BINDING_BYTES
        self._secret = binding

    def header_received(self, raw: bytes | memoryview) -> int:
        """Accept the next header; return the length of its body."""
        try:
            header = self.framing.accept_header(raw)
            self._check_due(header)
        except ProtocolError:
            self.state = HandshakeState.FAILED
            raise
        self._header = header
        self._raw_header = bytes(raw)
        return header.length

    def body_received(self, body: bytes) -> None:
        """Act on a frame whose body has arrived.

        Raises:
            HandshakeError: The sides disagree. ``outgoing`` may contain a last REFUSE.
            ProtocolError: The frame breaks a rule.
        """
        header = self._header
        assert header is not None, "body_received without header_received"
        self._header = None
        try:
            plain = self.framing.open(header, self._raw_header, body)
            if header.type == FrameType.REFUSE:
                raise self._refused(Refuse.decode(plain))
            self._advance(plain)
        except (HandshakeError, ProtocolError):
            self.state = HandshakeState.FAILED
            raise

    def refuse(self, code: WireCode) -> None:
        """Send REFUSE with a code; it is this side's last frame."""
        low, high = self.identity.versions
        message = Refuse(
            code=code, version_min=low, version_max=high, trust=self.identity.trust
        )
        self.state = HandshakeState.FAILED
        self._send(FrameType.REFUSE, message.encode())

    @abstractmethod
    def _advance(self, body: bytes) -> None:
        """Act on the expected frame."""

    def _check_due(self, header: Header) -> None:
        due = self.state.value
        if not isinstance(due, FrameType) or header.type not in (due, FrameType.REFUSE):
            raise UnexpectedFrame(
                "KVW-HS-04",
                f"{FrameType(header.type).name} while the handshake waits for "
                f"{self.state.name}",
            )
        if header.request or header.segment or header.offset:
            raise UnexpectedFrame(
                "KVW-HS-04", "a handshake frame with a request number"
            )

    def _next(self) -> None:
        self.state = TRANSITIONS[self.role, self.state]

    def _agree(
        self,
        theirs: TransportChoice | TransportOffer,
        message: Accept | Hello,
        version: int,
        choice: TransportChoice,
        offer: TransportOffer,
        named: bytes = b"",
    ) -> None:
        """Succeed: set :attr:`agreement` from the frames of both sides."""
        assert self._keys is not None
        mine = self.identity.parameters
        its = message.parameters
        if its == mine:
            its = mine  # usually the same object for all connections
        self.agreement = Agreement(
            role=self.role,
            digest=self._digest,
            keys=self._keys,
            parameters=common_parameters(mine, its),
            peer_parameters=its,
            peer=PeerInfo(
                name=theirs.name,
                incarnation=message.incarnation,
                address=None,
                trust=message.trust,
                version=version,
                profile=theirs.profile,
                key_id=named,
            ),
            choice=choice,
            offer=offer,
        )

    def _send(self, frame_type: FrameType, body: bytes) -> None:
        frame = self.framing.control(frame_type, body)
        self.outgoing.append(frame)  # bounded: CONTROL_QUEUE_BYTES_MAX, three in all

    def _refused(self, message: Refuse) -> HandshakeError:
        mine = self.identity
        if message.code == WireCode.VERSION:
            theirs = message.version_min, message.version_max
            return version_mismatch(mine.versions, theirs)
        if message.code == WireCode.AUTHENTICATION:
            return _trust_error(mine.trust, message.trust, from_peer=True)
        if message.code == WireCode.BUSY:
            return HandshakeError(
                "the peer has reached its connections_max: close some connections, "
                "or raise it"
            )
        text = f"the peer refused the connection with code {message.code}"
        error = error_from_code(message.code, text)
        return error if isinstance(error, HandshakeError) else HandshakeError(text)

    @property
    def _unbound(self) -> bool:
        """Whether TLS should have proved the peer's identity, but has not."""
        return self.identity.trust is TrustMode.MTLS and not self._secret

    def _check_profile(self, theirs: tuple[tuple[str, str], ...]) -> None:
        """Raise ProfileMismatch if a field of both sides differs (KVW-HS-08)."""
        mine = dict(self.identity.profile)
        differing = [
            (name, mine[name], value)
            for name, value in theirs
            if name in mine and mine[name] != value
        ]
        if differing:
            listed = ", ".join(
                f"{shown(name)} (here {shown(here)}, peer {shown(there)})"
                for name, here, there in differing
            )
            raise ProfileMismatch(
                f"these fields differ: {listed}",
                fields=tuple(name for name, _, _ in differing),
            )


class ClientHandshake(Handshake):
    """Runs the handshake of the side that connects."""

    role = Role.CLIENT

    def __init__(self, identity: Identity, nonce: bytes, offer: TransportOffer) -> None:
        super().__init__(identity, nonce, HandshakeState.ACCEPT)
        self._offer = offer
        self._hello = Hello(
            version_min=identity.versions[0],
            version_max=identity.versions[1],
            trust=identity.trust,
            parameters=identity.parameters,
            incarnation=identity.incarnation,
            key_id=key_id(identity.psk) if identity.psk else bytes(KEY_ID_BYTES),
            nonce=nonce,
        ).encode()
        self._accept: Accept | None = None
        self._send(FrameType.HELLO, self._hello)

    def _advance(self, body: bytes) -> None:
        if self.state is HandshakeState.ACCEPT:
            self._accepted(body)
        else:
            self._chosen(body)

    def _accepted(self, body: bytes) -> None:
        """Handle ACCEPT: KVW-HS-06 and KVW-HS-07."""
        identity = self.identity
        accept = Accept.decode(body)
        low, high = identity.versions
        if not low <= accept.version <= high:
            self.refuse(WireCode.VERSION)
            raise VersionMismatch(
                f"peer chose protocol version {accept.version}, this side speaks {low} "
                f"to {high}",
                fields=("version",),
            )
        keys = Keys.derive(self._secret, self._nonce, accept.nonce)
        digest = accepted_digest(self._hello, accept)
        differs = accept.trust is not identity.trust or self._unbound
        if differs or not hmac.compare_digest(accept.mac, keys.server_proof(digest)):
            self.refuse(WireCode.AUTHENTICATION)
            raise _trust_error(identity.trust, accept.trust)
        if accept.incarnation == identity.incarnation:
            self.refuse(WireCode.OTHER)
            raise HandshakeError(
                "this communicator dialled its own address: dial the peer's address, "
                "and check the address that the peer announces or advertises",
                fields=(OWN_INCARNATION,),
            )
        self._accept = accept
        self._digest = digest
        self._keys = keys
        self._next()
        proof = keys.client_proof(digest + accept.mac)
        self._send(FrameType.CONFIRM, Confirm(mac=proof).encode())
        if identity.trust is TrustMode.PSK:
            self.framing.use_seals(self.role, keys.seal)
        self._send(FrameType.OFFER, encode_body(self._offer))

    def _chosen(self, body: bytes) -> None:
        choice = narrowed(decode_body(FrameType.CHOICE, body), TransportChoice)
        accept = self._accept
        assert accept is not None
        self._check_profile(choice.profile)
        taken = [verdict.name for verdict in choice.verdicts if verdict.taken]
        if not taken:
            raise no_transport(choice)
        if taken[1:] or taken[0] not in {mine.name for mine in self._offer.backends}:
            listed = ", ".join(map(shown, taken))
            raise UnexpectedFrame(
                "KVW-HS-05", f"CHOICE takes {listed}, which was not offered"
            )
        self._next()
        self._agree(choice, accept, accept.version, choice, self._offer)


class ServerHandshake(Handshake):
    """Runs the handshake of the side that listens.

    Attributes:
        offer: The client's OFFER once it has arrived; :meth:`choose` answers it.
    """

    role = Role.SERVER

    def __init__(self, identity: Identity, nonce: bytes) -> None:
        super().__init__(identity, nonce, HandshakeState.HELLO)
        self.offer: TransportOffer | None = None
        self._hello: Hello | None = None
        self._version = 0
        self._proof = b""

    def choose(self, choice: TransportChoice) -> None:
        """Send CHOICE; if it chooses a transport, the handshake has succeeded."""
        hello = self._hello
        offer = self.offer
        assert self.state is HandshakeState.DECISION
        assert hello is not None
        assert offer is not None
        self._send(FrameType.CHOICE, encode_body(choice))
        if not any(verdict.taken for verdict in choice.verdicts):
            self.state = HandshakeState.FAILED
            raise no_transport(choice)
        self._next()
        named = hello.key_id if self.identity.psk else b""
        self._agree(offer, hello, self._version, choice, offer, named)

    def _advance(self, body: bytes) -> None:
        if self.state is HandshakeState.HELLO:
            self._greeted(body)
        elif self.state is HandshakeState.CONFIRM:
            self._confirmed(body)
        else:
            self._offered(narrowed(decode_body(FrameType.OFFER, body), TransportOffer))

    def _greeted(self, body: bytes) -> None:
        """Handle HELLO: KVW-HS-06 and KVW-HS-07."""
        identity = self.identity
        theirs = Hello.versions(body)
        version = common_version(identity.versions, theirs)
        if not version:
            self.refuse(WireCode.VERSION)
            raise version_mismatch(identity.versions, theirs)
        hello = Hello.decode(body)
        secret = self._secret
        if identity.trust is TrustMode.PSK:
            secret = identity.keys.get(hello.key_id, b"")
        unproved = identity.trust is not TrustMode.LOOPBACK and not secret
        if hello.trust is not identity.trust or unproved:
            self.refuse(WireCode.AUTHENTICATION)
            raise _trust_error(identity.trust, hello.trust)
        accept = Accept(
            version=version,
            trust=identity.trust,
            parameters=identity.parameters,
            incarnation=identity.incarnation,
            nonce=self._nonce,
        )
        keys = Keys.derive(secret, hello.nonce, self._nonce)
        self._digest = accepted_digest(body, accept)
        self._proof = keys.server_proof(self._digest)
        self._hello = hello
        self._keys = keys
        self._version = version
        self._next()
        self._send(FrameType.ACCEPT, replace(accept, mac=self._proof).encode())

    def _confirmed(self, body: bytes) -> None:
        keys = self._keys
        assert keys is not None
        expected = keys.client_proof(self._digest + self._proof)
        if not hmac.compare_digest(Confirm.decode(body).mac, expected):
            self.refuse(WireCode.AUTHENTICATION)
            raise _trust_error(self.identity.trust, self.identity.trust)
        self._next()
        if self.identity.trust is TrustMode.PSK:
            self.framing.use_seals(self.role, keys.seal)

    def _offered(self, offer: TransportOffer) -> None:
        mine = self.identity
        try:
            self._check_profile(offer.profile)
        except ProfileMismatch:
            nothing = TransportChoice(name=mine.name, verdicts=(), profile=mine.profile)
            self._send(FrameType.CHOICE, encode_body(nothing))
            raise
        self._next()
        self.offer = offer


def accepted_digest(hello: bytes, accept: Accept) -> bytes:
    """Return the digest that both proofs cover: HELLO, and ACCEPT without its proof."""
    bare = replace(accept, mac=bytes(MAC_BYTES))
    return transcript_hash(hello, bare.encode())


def no_transport(choice: TransportChoice) -> ProfileMismatch:
    """Return the error for a CHOICE without a transport, with the reason for each."""
    listed = "; ".join(f"{shown(v.name)}: {shown(v.reason)}" for v in choice.verdicts)
    return ProfileMismatch(
        f"the two sides have no transport in common: {listed or 'none was offered'}",
        fields=("backends",),
    )


def _trust_error(
    mine: TrustMode, theirs: TrustMode, *, from_peer: bool = False
) -> AuthenticationFailed:
    """Return the error for a wrong proof; ``from_peer`` if the peer reported it."""
    if mine is not theirs:
        return AuthenticationFailed(
            f"trust modes differ: this side {mine.name.lower()}, peer "
            f"{theirs.name.lower()}; set the same `trust` and `psk_file` on both",
            fields=("trust",),
        )
    if mine is TrustMode.MTLS and not from_peer:
        return AuthenticationFailed(
            "the peer's proof is for other certificates than this TLS connection has: "
            "something between the two ends TLS on the way",
            fields=("trust",),
        )
    if mine is TrustMode.MTLS:
        return AuthenticationFailed(
            "one side does not accept the other's certificate: its `tls_peers` does "
            "not name it, or something between the two ends TLS on the way; the log "
            "of the side that refused says which",
            fields=("tls_peers",),
        )
    return AuthenticationFailed(
        "the peer does not hold the same key; compare `psk_file` on both sides",
        fields=("psk_file",),
    )


def common_parameters(
    mine: ConnectionParameters, theirs: ConnectionParameters
) -> ConnectionParameters:
    """Return the smaller limits of two sides, and their common features."""
    if theirs == mine:
        return mine
    return ConnectionParameters(
        chunk_bytes=min(mine.chunk_bytes, theirs.chunk_bytes),
        eager_bytes=min(mine.eager_bytes, theirs.eager_bytes),
        window_bytes=min(mine.window_bytes, theirs.window_bytes),
        window_messages=min(mine.window_messages, theirs.window_messages),
        features=mine.features & theirs.features,
    )
