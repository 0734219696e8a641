"""What two sides agree on, and that it tells no secret."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvwire.proto.agreement import common_parameters
from kvwire.wire.handshake_messages import ConnectionParameters

counts = st.integers(0, 2**32 - 1)
parameters = st.builds(
    ConnectionParameters,
    chunk_bytes=counts,
    eager_bytes=counts,
    window_bytes=counts,
    window_messages=counts,
    features=counts,
)
LIMITS = ("chunk_bytes", "eager_bytes", "window_bytes", "window_messages")


@given(mine=parameters, theirs=parameters)
def test_the_smaller_limit_holds_and_features_are_those_of_both(
    mine: ConnectionParameters, theirs: ConnectionParameters
) -> None:
    agreed = common_parameters(mine, theirs)
    assert agreed == common_parameters(theirs, mine)
    for limit in LIMITS:
        both = (getattr(mine, limit), getattr(theirs, limit))
        assert getattr(agreed, limit) == min(both), limit
    assert agreed.features == mine.features & theirs.features
