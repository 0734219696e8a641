"""A pair over a socket: what strangers and faults befall."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.pairs import Pair, connected


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Two connected communicators that do not wait long at their end."""
    async with connected(close_timeout_s=0.5) as found:
        yield found
