"""Bootstraps: what one side writes the other reads, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import BackendUnavailable
from kvwire.limits import BOOTSTRAP_BYTES_MAX
from kvwire_ucx.bootstrap import MESSAGES, UcxBootstrap, parse
from kvwire_ucx.library import Version

SAMPLE = UcxBootstrap(lane=7, version=Version(1, 22, 0), address=b"an address")

ucx_bootstraps = st.builds(
    UcxBootstrap,
    lane=st.integers(0, 2**40 - 1),
    version=st.builds(Version, *(st.integers(0, 255),) * 3),
    address=st.binary(min_size=1, max_size=1000),
)


def test_another_format_names_the_difference() -> None:
    changed = bytearray(SAMPLE.to_bytes())
    changed[4] += 1
    with pytest.raises(BackendUnavailable, match="both sides need the same kvwire"):
        parse(bytes(changed))


def test_too_many_devices_are_an_error_that_says_so() -> None:
    wide = UcxBootstrap(
        lane=1, version=SAMPLE.version, address=bytes(BOOTSTRAP_BYTES_MAX)
    )
    with pytest.raises(BackendUnavailable, match="UCX_NET_DEVICES"):
        wide.to_bytes()


def test_an_address_without_end_leads_into_zeros() -> None:
    assert SAMPLE.padded_address.startswith(SAMPLE.address)
    assert SAMPLE.padded_address.removeprefix(SAMPLE.address).strip(b"\0") == b""
    assert len(SAMPLE.padded_address) > len(SAMPLE.address) + 1000


@given(ucx_bootstraps)
def test_what_one_side_writes_the_other_reads(bootstrap: UcxBootstrap) -> None:
    assert parse(bootstrap.to_bytes()) == bootstrap


@given(ucx_bootstraps, st.binary(min_size=9, max_size=9))
def test_bytes_that_former_versions_used_are_ignored(
    bootstrap: UcxBootstrap, used: bytes
) -> None:
    """The number of their process, its namespace, and what they lent."""
    written = bootstrap.to_bytes()
    assert parse(written[:8] + used + written[17:]) == bootstrap


@given(ucx_bootstraps, ucx_bootstraps, *[st.integers(0, MESSAGES - 1)] * 2)
def test_tags_of_two_lanes_never_meet(
    one: UcxBootstrap, other: UcxBootstrap, first: int, second: int
) -> None:
    same = (one.lane, first) == (other.lane, second)
    assert (one.tag(first) == other.tag(second)) is same
    assert one.tag(first) < 2**64
