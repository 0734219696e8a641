"""The handshake accepts what both sides mean, and nothing else (goal S6)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvwire.errors import (
    AuthenticationFailed,
    HandshakeError,
    HandshakeTimeout,
    ProfileMismatch,
    UnexpectedFrame,
    VersionMismatch,
    WireCode,
)
from kvwire.limits import HANDSHAKE_BODY_BYTES
from kvwire.proto.framing import Framing
from kvwire.proto.handshake import (
    OWN_INCARNATION,
    Handshake,
    HandshakeState,
    Identity,
    accepted_digest,
)
from kvwire.types import Role, TrustMode
from kvwire.wire.control import HandshakeVerdict, TransportChoice, encode_body
from kvwire.wire.handshake_messages import (
    MAGIC,
    Accept,
    ConnectionParameters,
    Refuse,
)
from kvwire.wire.header import Flag, FrameType, decode_header, encode_header
from tests.proto.shaking import (
    at_frame,
    both_fail,
    both_modes,
    recorded,
    shake_until,
    start,
    types,
)
from tests.support.core_pair.handshakes import (
    BINDING,
    PSK,
    SMALL,
    Frame,
    Shaking,
    begin,
    identity,
    receive,
    shake,
)
from tests.support.debug import needs_asserts

OTHER_PSK = bytes(range(1, 33))


@pytest.mark.rule("KVW-HS-04", "KVW-HS-05", "KVW-HS-06", "keeps")
@pytest.mark.rule("KVW-HS-07", "KVW-HS-08", "keeps")
@both_modes
def test_both_sides_agree(trust: TrustMode) -> None:
    """On keys, digest, the smaller of all terms, names, and the transport."""
    mine = _terms(2**20, 500, 10_000, 3, 0b0110)
    theirs = _terms(2**17, 900, 8_000, 30, 0b0011)
    shaking = shake(
        begin(
            identity("client", trust=trust, parameters=mine),
            identity("server", trust=trust, parameters=theirs),
            backends=("memory", "a"),
        )
    )
    client, server = shaking.client.agreement, shaking.server.agreement
    assert client is not None
    assert server is not None
    assert client.keys == server.keys
    assert client.digest == server.digest
    assert client.parameters == server.parameters
    assert client.parameters == _terms(2**17, 500, 8_000, 3, 0b0010)
    assert (client.peer_parameters, server.peer_parameters) == (theirs, mine)
    assert (client.role, server.role) == (Role.CLIENT, Role.SERVER)
    assert (client.peer.name, server.peer.name) == ("server", "client")
    assert client.peer.incarnation == b"server.........."
    assert client.peer.trust is server.peer.trust is trust
    assert client.peer.version == server.peer.version == 1
    assert client.choice == server.choice
    assert client.offer == server.offer
    assert [(v.name, v.taken) for v in client.choice.verdicts] == [
        ("memory", True),
        ("a", False),
    ]
    assert types(shaking.sent) == [
        *(FrameType.HELLO, FrameType.ACCEPT, FrameType.CONFIRM),
        *(FrameType.OFFER, FrameType.CHOICE),
    ]
    # Seals begin after CONFIRM, in psk mode and in no other.
    in_psk = trust is TrustMode.PSK
    flags = [frame[0][1] == Flag.SEALED for _, frame in shaking.sent]
    assert flags == [False, False, False, in_psk, in_psk]
    for handshake in (shaking.client, shaking.server):
        assert handshake.state is HandshakeState.DONE


def _terms(*numbers: int) -> ConnectionParameters:
    return ConnectionParameters.read(numbers)


def test_no_answer_is_longer_than_the_question() -> None:
    """Rule H: until the client has proved itself."""
    sizes = [(role, sum(map(len, frame))) for role, frame in recorded(TrustMode.PSK)]
    assert sizes[:3] == [(Role.CLIENT, 256), (Role.SERVER, 256), (Role.CLIENT, 256)]
    shaking = begin(identity("c"), identity("s", trust=TrustMode.PSK))
    with pytest.raises(AuthenticationFailed):
        receive(shaking.server, shaking.client.outgoing.pop())
    (refusal,) = shaking.server.outgoing
    assert sum(map(len, refusal)) == 256


def test_the_highest_common_version() -> None:
    """Of overlapping ranges."""
    for client, server, agreed in (
        ((1, 1), (1, 1), 1),
        ((1, 5), (3, 9), 5),
        ((3, 9), (1, 5), 5),
        ((2, 4), (4, 4), 4),
    ):
        shaking = shake(
            begin(identity("c", versions=client), identity("s", versions=server))
        )
        assert shaking.client.agreement is not None
        assert shaking.client.agreement.peer.version == agreed


@pytest.mark.parametrize("later", Role)
def test_a_later_minor_version_is_met(later: Role) -> None:
    """Its additions are bits that this version does not set, and fields at the end."""
    more = replace(SMALL, features=1 | 1 << 63)
    sides = [identity("a"), identity("b")]
    sides[later] = replace(sides[later], versions=(1, 2), parameters=more)
    shaking = begin(*sides)
    if later is Role.CLIENT:
        _, (header, body) = shake_until(shaking, FrameType.OFFER)[-1]
        longer = [*msgspec.msgpack.decode(body), "an addition"]
        framing = Framing()
        framing.sent = decode_header(header).sequence
        shaking.client.outgoing.append(
            framing.control(FrameType.OFFER, msgspec.msgpack.encode(longer))
        )
    shake(shaking)
    for role in Role:
        agreement = shaking.of(role).agreement
        assert agreement is not None
        assert agreement.peer.version == 1
        assert agreement.parameters.features == 0


@pytest.mark.rule("KVW-HS-06", "breaks")
def test_a_later_major_version_is_refused_by_name() -> None:
    """By a server of this one, and by a client, whatever else the peer may write."""
    said = "peer speaks protocol versions 2 to 3, this side 1 to 1; upgrade the older"
    shaking = begin()
    _, body = shaking.client.outgoing.pop()
    later = MAGIC + b"\2\0\3\0" + b"\xff" * (len(body) - 12)
    hello = Framing().control(FrameType.HELLO, later)
    with pytest.raises(VersionMismatch, match=said) as caught:
        receive(shaking.server, hello)
    assert caught.value.fields == ("version",)
    (refusal,) = shaking.server.outgoing
    assert Refuse.decode(refusal[1]).version_max == 1
    shaking = begin()
    later = MAGIC + b"\x10\0" + b"\2\0\3\0" + b"\xff" * (len(body) - 14)
    with pytest.raises(VersionMismatch, match=said) as caught:
        receive(shaking.client, Framing().control(FrameType.REFUSE, later))
    assert caught.value.fields == ("version",)


def test_profiles_agree_where_both_speak() -> None:
    """A field that only one side names stands in nobody's way."""
    client = identity("c", profile=(("model", "m"), ("mine", "1")))
    server = identity("s", profile=(("model", "m"), ("theirs", "2")))
    shaking = shake(begin(client, server))
    assert shaking.server.agreement is not None
    assert shaking.server.agreement.peer.profile == client.profile


def mismatch(
    client: Identity, server: Identity, kind: type[HandshakeError], *fields: str
) -> list[str]:
    errors = both_fail(begin(client, server))
    assert set(errors) == set(Role)
    for error in errors.values():
        assert type(error) is kind
        assert isinstance(error, HandshakeError)
        assert error.fields == fields
    return [str(errors[role]) for role in Role]


@pytest.mark.rule("KVW-HS-06", "breaks")
@pytest.mark.parametrize(("client", "server"), [((1, 1), (2, 3)), ((4, 5), (2, 3))])
def test_versions_that_do_not_overlap(
    client: tuple[int, int], server: tuple[int, int]
) -> None:
    """Both sides say both ranges."""
    texts = mismatch(
        identity("c", versions=client),
        identity("s", versions=server),
        VersionMismatch,
        "version",
    )
    for text in texts:
        for number in (*client, *server):
            assert str(number) in text


@both_modes
def test_a_client_that_has_dialled_itself_says_no(trust: TrustMode) -> None:
    """Before it says who it is: the server has learned nothing, and has an end."""
    mine = identity("same", trust=trust)
    errors = both_fail(begin(mine, mine))
    assert set(errors) == set(Role)
    own = errors[Role.CLIENT]
    assert isinstance(own, HandshakeError)
    assert own.fields == (OWN_INCARNATION,)
    assert "code 63" in str(errors[Role.SERVER])


@pytest.mark.rule("KVW-HS-07", "breaks")
def test_trust_modes_and_keys_that_differ() -> None:
    """Both sides say both modes, or where to look, and nothing of a key."""
    for client, server in itertools.permutations(TrustMode, 2):
        sides = identity("c", trust=client), identity("s", trust=server)
        for text in mismatch(*sides, AuthenticationFailed, "trust"):
            assert client.name.lower() in text
            assert server.name.lower() in text
    one, other = (
        identity("c", trust=TrustMode.PSK, psk=psk) for psk in (PSK, OTHER_PSK)
    )
    for text in mismatch(one, other, AuthenticationFailed, "psk_file"):
        assert PSK.hex()[:8] not in text


@pytest.mark.rule("KVW-HS-07", "breaks")
@pytest.mark.parametrize(
    "bindings", [(BINDING, b""), (b"", BINDING), (b"", b""), (BINDING, BINDING[::-1])]
)
def test_mtls_without_the_same_tls_connection(bindings: tuple[bytes, bytes]) -> None:
    """No proof without TLS, and none that fits two TLS connections in a row."""
    both = identity("c", trust=TrustMode.MTLS), identity("s", trust=TrustMode.MTLS)
    errors = both_fail(begin(*both, bindings=bindings))
    assert set(errors) == set(Role)
    for error in errors.values():
        assert isinstance(error, AuthenticationFailed)
    # Who finds it out knows that it is not a matter of names; who is told does not.
    assert any("for other certificates" in str(error) for error in errors.values())


@needs_asserts
def test_only_mtls_is_bound_to_tls() -> None:
    with pytest.raises(AssertionError, match="only TLS"):
        start(TrustMode.PSK).server.bind(BINDING)
    with pytest.raises(AssertionError):
        start(TrustMode.MTLS).server.bind(BINDING[1:])


@pytest.mark.rule("KVW-HS-07", "breaks")
def test_no_key_is_not_a_key() -> None:
    """A client that names no key, and proves that it holds the empty one."""
    nobody = identity("c", trust=TrustMode.PSK, psk=b"")
    shaking = begin(nobody, identity("s", trust=TrustMode.PSK))
    with pytest.raises(AuthenticationFailed):
        receive(shaking.server, shaking.client.outgoing.pop())
    assert types([(Role.SERVER, frame) for frame in shaking.server.outgoing]) == [
        FrameType.REFUSE
    ]


@pytest.mark.rule("KVW-HS-08", "breaks")
@both_modes
def test_profiles_that_differ(trust: TrustMode) -> None:
    """Every differing field by name, with both values, cut to what fits a log."""
    long = "x" * 128
    client = identity("c", trust=trust, profile=(("a", "1"), ("b", "2"), ("c", long)))
    server = identity("s", trust=trust, profile=(("c", "4"), ("b", "2"), ("a", "3")))
    errors = both_fail(begin(client, server))
    for role, fields, a in (
        (Role.SERVER, ("a", "c"), "'a' (here '3', peer '1')"),
        (Role.CLIENT, ("c", "a"), "'a' (here '1', peer '3')"),
    ):
        error = errors[role]
        assert isinstance(error, ProfileMismatch)
        assert error.fields == fields
        assert long not in str(error)
        assert a in str(error)
        assert "'4'" in str(error)


@pytest.mark.rule("KVW-HS-08", "breaks")
@both_modes
def test_no_transport_in_common(trust: TrustMode) -> None:
    """The reasons are told on both sides, quoted."""
    shaking = start(trust)
    verdicts = (
        HandshakeVerdict("memory", False, "line\nbreak"),
        HandshakeVerdict("tcp", False, "not here"),
    )
    answer = TransportChoice(name="s", verdicts=verdicts, profile=())
    error = _refused_by(shaking, answer)
    assert shaking.server.state is HandshakeState.FAILED
    with pytest.raises(ProfileMismatch) as caught:
        receive(shaking.client, shaking.server.outgoing.pop())
    for said in (caught.value, error):
        assert said.fields == ("backends",)
        assert "'memory': 'line\\nbreak'; 'tcp': 'not here'" in str(said)


def _refused_by(shaking: Shaking, answer: TransportChoice) -> ProfileMismatch:
    server = shaking.server
    for _ in range(2):
        for handshake, other in ((shaking.client, server), (server, shaking.client)):
            while handshake.outgoing:
                header, body = handshake.outgoing.pop(0)
                other.header_received(header)
                other.body_received(body)
    with pytest.raises(ProfileMismatch) as caught:
        server.choose(answer)
    return caught.value


@pytest.mark.rule("KVW-HS-05", "breaks")
@pytest.mark.parametrize("taken", [("other",), ("memory", "second"), ("a", "b")])
def test_a_choice_that_was_not_offered(taken: tuple[str, ...]) -> None:
    """Another transport, or more than one."""
    shaking = begin(backends=("memory", "second"))
    shake_until(shaking, FrameType.CHOICE)
    verdicts = tuple(HandshakeVerdict(name, True, "taken") for name in taken)
    body = encode_body(TransportChoice(name="s", verdicts=verdicts, profile=()))
    framing = Framing()
    framing.sent = 1
    with pytest.raises(UnexpectedFrame, match="KVW-HS-05"):
        receive(shaking.client, framing.control(FrameType.CHOICE, body))
    assert shaking.client.agreement is None


@pytest.mark.rule("KVW-HS-04", "breaks")
@both_modes
def test_any_other_frame(trust: TrustMode) -> None:
    """Every type but the one that is due and REFUSE; and none that names a request."""
    for index, frame_type in itertools.product(range(5), FrameType):
        shaking, role, frame = at_frame(trust, index)
        receiver = shaking.of(role.other)
        if frame_type in (FrameType.REFUSE, frame[0][0]):
            continue
        flags = frame[0][1] if frame_type < FrameType.MESSAGE else 0
        length = HANDSHAKE_BODY_BYTES if frame_type < FrameType.OFFER else 40
        header = encode_header(frame_type, flags, receiver.framing.received, length)
        with pytest.raises(UnexpectedFrame, match="KVW-HS-04"):
            receiver.header_received(header)
        assert receiver.state is HandshakeState.FAILED
    for field in ("request", "segment", "offset"):
        header = encode_header(FrameType.HELLO, Flag.CHECKED, 0, 224, **{field: 1})
        with pytest.raises(UnexpectedFrame, match="KVW-HS-04"):
            start(trust).server.header_received(header)


@pytest.mark.rule("KVW-HS-04", "breaks")
@pytest.mark.parametrize("role", list(Role))
def test_nothing_follows_the_end(role: Role) -> None:
    """Done or failed: not even REFUSE."""
    done = shake(start(TrustMode.LOOPBACK)).of(role)
    failed = start(TrustMode.LOOPBACK).of(role)
    failed.refuse(WireCode.BUSY)
    for handshake in (done, failed):
        framing = Framing()
        framing.sent = handshake.framing.received
        body = Refuse(
            code=1, version_min=1, version_max=1, trust=TrustMode.LOOPBACK
        ).encode()
        header, _ = framing.control(FrameType.REFUSE, body)
        with pytest.raises(UnexpectedFrame):
            handshake.header_received(header)


@pytest.mark.rule("KVW-HS-04", "breaks")
def test_a_second_offer_before_the_first_is_answered() -> None:
    """The server decides about one."""
    shaking = start(TrustMode.LOOPBACK)
    seen = shake_until(shaking, FrameType.OFFER)
    _, (header, body) = seen[-1]
    shaking.server.header_received(header)
    shaking.server.body_received(body)
    assert shaking.server.state is HandshakeState.DECISION
    framing = Framing()
    framing.sent = shaking.server.framing.received
    again, _ = framing.control(FrameType.OFFER, body)
    with pytest.raises(UnexpectedFrame):
        shaking.server.header_received(again)


def accept_with(shaking: Shaking, change: dict[str, Any], *, prove: bool) -> Frame:
    """An ACCEPT of a server that does something else, with a right proof if asked."""
    hello = shaking.client.outgoing.pop(0)
    receive(shaking.server, hello)
    honest = Accept.decode(shaking.server.outgoing.pop(0)[1])
    changed = replace(honest, **change)
    keys = shaking.server._keys
    assert keys is not None
    proof = (
        keys.server_proof(accepted_digest(hello[1], changed)) if prove else b"p" * 32
    )
    return Framing().control(FrameType.ACCEPT, replace(changed, mac=proof).encode())


@pytest.mark.rule("KVW-HS-06", "KVW-HS-07", "breaks")
def test_what_was_not_asked_for() -> None:
    """Another version, or a trust mode: a downgrade, even under a right proof."""
    cases = [({"version": version}, True) for version in (0, 2, 65_535)]
    cases += [({"trust": TrustMode.LOOPBACK}, prove) for prove in (True, False)]
    for change, prove in cases:
        shaking = start(TrustMode.PSK)
        frame = accept_with(shaking, change, prove=prove)
        with pytest.raises((VersionMismatch, AuthenticationFailed)) as caught:
            receive(shaking.client, frame)
        assert caught.value.fields == tuple(change)
        (refusal,) = shaking.client.outgoing
        told = Refuse.decode(refusal[1]).code
        assert (told == WireCode.VERSION) == ("version" in change)


# --- REFUSE

POINTS = list(itertools.product(TrustMode, range(1, 5)))


REFUSALS = (
    (WireCode.VERSION, VersionMismatch, ("version",)),
    (WireCode.AUTHENTICATION, AuthenticationFailed, None),
    (WireCode.PROFILE, ProfileMismatch, ()),
    (WireCode.HANDSHAKE_TIMEOUT, HandshakeTimeout, ()),
    (WireCode.BUSY, HandshakeError, ()),
    (WireCode.DEADLINE, HandshakeError, ()),
    (9999, HandshakeError, ()),
)


@pytest.mark.parametrize(
    ("trust", "index"),
    # In psk mode the client says CONFIRM and OFFER at once, so it has no third chance.
    [case for case in POINTS if case != (TrustMode.PSK, 2)],
)
def test_a_refusal_at_every_point(trust: TrustMode, index: int) -> None:
    """From either side, sealed or not, with any code: one documented error."""
    files = ("tls_peers",) if trust is TrustMode.MTLS else ("psk_file",)
    for code, kind, fields in REFUSALS:
        shaking, role, _ = at_frame(trust, index)
        sender, receiver = shaking.of(role), shaking.of(role.other)
        sender.outgoing.clear()
        sender.framing.sent = receiver.framing.received
        refuse_with(sender, code)
        with pytest.raises(kind) as caught:
            receive(receiver, sender.outgoing.pop())
        assert type(caught.value) is kind
        assert caught.value.fields == (files if fields is None else fields)
        assert receiver.state is HandshakeState.FAILED
        assert receiver.outgoing == []


def refuse_with(handshake: Handshake, code: int) -> None:
    if code in set(WireCode):
        handshake.refuse(WireCode(code))
        return
    mode = handshake.identity.trust
    body = Refuse(code=code, version_min=1, version_max=1, trust=mode).encode()
    handshake.outgoing.append(handshake.framing.control(FrameType.REFUSE, body))
