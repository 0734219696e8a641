"""Bootstraps say what they said, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import BackendUnavailable
from kvwire.limits import BOOTSTRAP_BYTES_MAX
from kvwire_nccl.bootstrap import NcclBootstrap

names = st.binary(max_size=256)


@given(library=st.text(max_size=16), there=names, back=names)
def test_what_was_said_is_read(library: str, there: bytes, back: bytes) -> None:
    said = NcclBootstrap(library, there, back)
    raw = said.encode()
    assert len(raw) <= BOOTSTRAP_BYTES_MAX
    assert NcclBootstrap.decode(raw) == said


@given(st.binary(max_size=400))
def test_bytes_of_a_stranger(raw: bytes) -> None:
    with pytest.raises(BackendUnavailable, match="bootstrap cannot be read"):
        NcclBootstrap.decode(raw)


@given(cut=st.integers(0, 40), more=st.binary(min_size=1, max_size=5))
def test_neither_less_nor_more(cut: int, more: bytes) -> None:
    raw = NcclBootstrap("NCCL 2.28.9", b"a" * 8, b"b" * 8).encode()
    with pytest.raises(BackendUnavailable, match="bootstrap cannot be read"):
        NcclBootstrap.decode(raw[: min(cut, len(raw) - 1)])
    with pytest.raises(BackendUnavailable, match="bootstrap cannot be read"):
        NcclBootstrap.decode(raw + more)


def test_a_name_that_is_no_text() -> None:
    raw = NcclBootstrap("x", b"", b"").encode()[:-1] + b"\xff"
    with pytest.raises(BackendUnavailable, match="a name that is no text"):
        NcclBootstrap.decode(raw)


def test_versions_are_named() -> None:
    with pytest.raises(BackendUnavailable, match=r"NCCL 2\.30\.4 .* 'NCCL 2\.28\.9'"):
        NcclBootstrap("NCCL 2.28.9").require_same_library("NCCL 2.30.4")
