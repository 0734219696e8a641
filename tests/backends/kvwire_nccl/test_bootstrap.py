"""Bootstraps say what they said, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from kvwire.errors import BackendUnavailable
from kvwire_nccl.bootstrap import NcclBootstrap


def test_a_name_that_is_no_text() -> None:
    raw = NcclBootstrap("x", b"", b"").encode()[:-1] + b"\xff"
    with pytest.raises(BackendUnavailable, match="a name that is no text"):
        NcclBootstrap.decode(raw)
