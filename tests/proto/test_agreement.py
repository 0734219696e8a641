"""What two sides agree on, and that it tells no secret."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvwire.proto.agreement import Identity, common_terms
from kvwire.types import TrustMode
from kvwire.wire.handshake_messages import ConnectionParameters

counts = st.integers(0, 2**32 - 1)
terms = st.builds(
    ConnectionParameters,
    chunk_bytes=counts,
    eager_bytes=counts,
    window_bytes=counts,
    window_messages=counts,
    features=counts,
)
LIMITS = ("chunk_bytes", "eager_bytes", "window_bytes", "window_messages")


@given(mine=terms, theirs=terms)
def test_both_sides_come_to_the_same_terms(
    mine: ConnectionParameters, theirs: ConnectionParameters
) -> None:
    assert common_terms(mine, theirs) == common_terms(theirs, mine)


@given(mine=terms, theirs=terms)
def test_the_smaller_limit_holds(
    mine: ConnectionParameters, theirs: ConnectionParameters
) -> None:
    agreed = common_terms(mine, theirs)
    for limit in LIMITS:
        both = (getattr(mine, limit), getattr(theirs, limit))
        assert getattr(agreed, limit) == min(both), limit


@given(mine=terms, theirs=terms)
def test_a_feature_is_used_if_both_have_it(
    mine: ConnectionParameters, theirs: ConnectionParameters
) -> None:
    features = common_terms(mine, theirs).features
    for bit in range(32):
        assert features >> bit & 1 == mine.features >> bit & theirs.features >> bit & 1


def test_an_identity_that_is_printed_keeps_its_keys() -> None:
    secret = b"a secret of this side"
    mine = Identity(
        name="p-0",
        incarnation=bytes(16),
        trust=TrustMode.PSK,
        terms=ConnectionParameters(
            chunk_bytes=1, eager_bytes=1, window_bytes=1, window_messages=1
        ),
        psk=secret,
        keys={b"id": secret},
    )
    assert "p-0" in repr(mine)
    assert secret.decode() not in repr(mine)
