"""What the tests of NIXL share: whether there is one, and agents for both sides."""

from __future__ import annotations

import pytest

from kvwire_nixl import NixlBackend

_AVAILABILITY = NixlBackend.availability()

needs_nixl = pytest.mark.skipif(
    not _AVAILABILITY.available,
    reason=f"{_AVAILABILITY.reason}; the tests take: make test-nixl",
)
