"""The four fixed messages: round trips, and every byte that must not be there."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import MalformedFrame, WireCode
from kvwire.limits import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    EAGER_BYTES_MAX,
    EAGER_WINDOW_BYTES_MAX,
    HANDSHAKE_BODY_BYTES,
)
from kvwire.types import TrustMode
from kvwire.wire.handshake_messages import (
    MAGIC,
    Accept,
    Confirm,
    ConnectionParameters,
    Hello,
    Refuse,
    common_version,
    version_mismatch,
)

TERMS = ConnectionParameters(
    chunk_bytes=CHUNK_BYTES_MIN,
    eager_bytes=64,
    window_bytes=1024,
    window_messages=8,
    features=2**64 - 1,
)
HELLO = Hello(
    version_min=1,
    version_max=2,
    trust=TrustMode.PSK,
    parameters=TERMS,
    incarnation=b"i" * 16,
    key_id=b"k" * 16,
    nonce=b"n" * 32,
)
ACCEPT = Accept(
    version=1,
    trust=TrustMode.PSK,
    parameters=TERMS,
    incarnation=b"i" * 16,
    nonce=b"n" * 32,
    mac=b"m" * 32,
)
CONFIRM = Confirm(mac=b"m" * 32)
REFUSE = Refuse(code=17, version_min=1, version_max=2, trust=TrustMode.LOOPBACK)


class Message(Protocol):
    def encode(self) -> bytes: ...

    @classmethod
    def decode(cls, body: bytes) -> Message: ...


MESSAGES: list[Message] = [HELLO, ACCEPT, CONFIRM, REFUSE]
# Bytes of each message that mean something, counted in the document.
USED = {Hello: 102, Accept: 116, Confirm: 40, Refuse: 15}

every_message = pytest.mark.parametrize(
    "message", MESSAGES, ids=lambda message: type(message).__name__
)

trusts = st.sampled_from(TrustMode)
u16 = st.integers(0, 2**16 - 1)
codes = u16.filter(lambda code: code != WireCode.VERSION)
ids, digests = (st.binary(min_size=n, max_size=n) for n in (16, 32))


@st.composite
def parameters(draw: st.DrawFn) -> ConnectionParameters:
    eager = draw(st.integers(0, EAGER_BYTES_MAX))
    return ConnectionParameters(
        chunk_bytes=draw(st.integers(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)),
        eager_bytes=eager,
        window_bytes=draw(st.integers(eager, EAGER_WINDOW_BYTES_MAX)),
        window_messages=draw(st.integers(1, 2**20)),
        features=draw(st.integers(0, 2**64 - 1)),
    )


@st.composite
def messages(draw: st.DrawFn) -> Message:
    low, high = sorted((draw(st.integers(1, 2**16 - 1)), draw(u16)))
    trust = draw(trusts)
    kind = draw(st.sampled_from(MESSAGES))
    if isinstance(kind, Hello):
        return Hello(
            version_min=max(1, low),
            version_max=high,
            trust=trust,
            parameters=draw(parameters()),
            incarnation=draw(ids),
            key_id=draw(ids),
            nonce=draw(digests),
        )
    if isinstance(kind, Accept):
        return Accept(
            version=low,
            trust=trust,
            parameters=draw(parameters()),
            incarnation=draw(ids),
            nonce=draw(digests),
            mac=draw(digests),
        )
    if isinstance(kind, Confirm):
        return Confirm(mac=draw(digests))
    return Refuse(code=draw(codes), version_min=low, version_max=high, trust=trust)


@pytest.mark.rule("KVW-HS-01", "KVW-HS-02", "KVW-HS-03", "keeps")
@given(messages())
def test_what_is_written_is_read(message: Message) -> None:
    """Over the whole range of every field, in a body of one size."""
    body = message.encode()
    assert len(body) == HANDSHAKE_BODY_BYTES
    assert body.startswith(MAGIC)
    assert type(message).decode(body) == message


@pytest.mark.rule("KVW-HS-01", "breaks")
@every_message
def test_another_length(message: Message) -> None:
    """Truncated at each byte, and with bytes appended."""
    body = message.encode()
    for wrong in (*(body[:end] for end in range(len(body))), body + b"\0", body * 2):
        with pytest.raises(MalformedFrame) as caught:
            type(message).decode(wrong)
        assert caught.value.rule == "KVW-HS-01"


def changed(body: bytes, place: int, bits: int) -> bytes:
    damaged = bytearray(body)
    damaged[place] ^= bits
    return bytes(damaged)


@pytest.mark.rule("KVW-HS-01", "breaks")
@every_message
def test_every_bit_means_something(message: Message) -> None:
    """Changed, it is refused, or it makes another message: none is ignored.

    A transfer that rewrites line ends is noticed by the magic, and nothing can be
    hidden in what is unused.
    """
    body, used = message.encode(), USED[type(message)]
    for bit in range(8 * HANDSHAKE_BODY_BYTES):
        place = bit // 8
        damaged = changed(body, place, 1 << bit % 8)
        try:
            read = type(message).decode(damaged)
        except MalformedFrame:
            continue
        assert len(MAGIC) <= place < used
        assert read != message
        assert read.encode() == damaged


@pytest.mark.rule("KVW-HS-03", "breaks")
@pytest.mark.parametrize(("message", "place"), [(HELLO, 12), (ACCEPT, 10)])
def test_a_message_that_was_sent_back(message: Message, place: int) -> None:
    """The role is that of the sender; all other 255 values are refused."""
    body = message.encode()
    for bits in range(1, 256):
        with pytest.raises(MalformedFrame) as caught:
            type(message).decode(changed(body, place, bits))
        assert caught.value.rule == "KVW-HS-03"


OUT_OF_RANGE = [
    ("chunk_bytes", CHUNK_BYTES_MIN - 1),
    ("chunk_bytes", CHUNK_BYTES_MAX + 1),
    ("chunk_bytes", 2**32 - 1),
    ("eager_bytes", EAGER_BYTES_MAX + 1),
    ("window_bytes", EAGER_WINDOW_BYTES_MAX + 1),
    ("window_bytes", TERMS.eager_bytes - 1),
    ("window_messages", 0),
    ("window_messages", 2**20 + 1),
]


@pytest.mark.rule("KVW-HS-02", "breaks")
@pytest.mark.parametrize("message", [HELLO, ACCEPT], ids=["hello", "accept"])
def test_terms_out_of_range(message: Hello | Accept) -> None:
    """The message names the field and the value."""
    for field, value in OUT_OF_RANGE:
        wrong = replace(message, parameters=replace(TERMS, **{field: value}))
        with pytest.raises(MalformedFrame, match=f"{field}={value}") as caught:
            type(message).decode(wrong.encode())
        assert caught.value.rule == "KVW-HS-02"


@pytest.mark.rule("KVW-HS-02", "breaks")
@pytest.mark.parametrize("versions", [(0, 0), (0, 1), (2, 1), (65_535, 1)])
def test_versions_that_are_no_range(versions: tuple[int, int]) -> None:
    """There is no version 0, and the lowest is not above the highest."""
    low, high = versions
    with pytest.raises(MalformedFrame, match=f"{low} to {high}") as caught:
        Hello.decode(replace(HELLO, version_min=low, version_max=high).encode())
    assert caught.value.rule == "KVW-HS-02"


@pytest.mark.rule("KVW-HS-01", "keeps")
def test_what_a_later_version_says_of_its_versions_is_read() -> None:
    """Whatever else it has put into the same 224 bytes."""
    later = b"\xff" * (HANDSHAKE_BODY_BYTES - len(MAGIC) - 4)
    assert Hello.versions(MAGIC + b"\2\0\3\0" + later) == (2, 3)
    with pytest.raises(MalformedFrame):
        Hello.decode(MAGIC + b"\2\0\3\0" + later)
    refusal = MAGIC + b"\x10\0" + b"\2\0\3\0" + later[2:]
    read = Refuse.decode(refusal)
    assert (read.code, read.version_min, read.version_max) == (16, 2, 3)
    with pytest.raises(MalformedFrame):
        Refuse.decode(refusal.replace(b"\x10", b"\x11"))


def test_the_highest_version_that_both_speak() -> None:
    for mine, theirs, common in (
        ((1, 1), (1, 1), 1),
        ((1, 3), (2, 9), 3),
        ((2, 9), (1, 3), 3),
        ((1, 1), (2, 3), 0),
        ((2, 3), (1, 1), 0),
    ):
        assert common_version(mine, theirs) == common
    error = version_mismatch((1, 1), (2, 3), "the server")
    assert str(error) == (
        "the server speaks protocol versions 2 to 3, this side 1 to 1; upgrade the "
        "older one"
    )
    assert error.fields == ("version",)


@pytest.mark.rule("KVW-HS-02", "breaks")
@pytest.mark.parametrize(
    ("message", "place"), [(HELLO, 13), (ACCEPT, 11), (REFUSE, 14)]
)
def test_trust_modes_nobody_knows(message: Message, place: int) -> None:
    """All values that are none."""
    body = bytearray(message.encode())
    for value in set(range(256)) - set(TrustMode):
        body[place] = value
        with pytest.raises(MalformedFrame, match=f"trust mode {value}") as caught:
            type(message).decode(bytes(body))
        assert caught.value.rule == "KVW-HS-02"


@given(st.sampled_from(MESSAGES), st.binary(max_size=HANDSHAKE_BODY_BYTES))
def test_any_bytes_are_a_message_or_break_a_rule(kind: Message, tail: bytes) -> None:
    """Behind a right magic, and padded to the right length."""
    body = (MAGIC + tail)[:HANDSHAKE_BODY_BYTES].ljust(HANDSHAKE_BODY_BYTES, b"\0")
    try:
        message = type(kind).decode(body)
    except MalformedFrame:
        return
    assert message.encode() == body
