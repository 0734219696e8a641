"""The pytest plugin of kvwire: two connected communicators as a fixture.

::

    async def test_my_server(kvwire_pair):
        await kvwire_pair.ab.send(1, b"prompt")

    @pytest.mark.parametrize("kvwire_backend", ["inproc", "tcp"], indirect=True)
    async def test_over_both(kvwire_pair): ...

pytest imports this module in every run where kvwire is installed. So the module imports
the rest of kvwire only when a fixture is used.

pytest-asyncio runs the async fixtures, or anyio's plugin if a test is marked for anyio.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvwire.testing.harness import Loopback


@pytest.fixture
def kvwire_backend(request: pytest.FixtureRequest) -> str:
    """Return the backend of ``kvwire_pair``: ``"inproc"``, or the test's parameter.

    Override it, or parametrise it indirectly, to run tests over another backend.
    """
    backend = getattr(request, "param", "inproc")
    assert isinstance(backend, str), f"kvwire_backend: {backend!r} is not a name"
    return backend


def _async_fixture(function: Callable[..., Any]) -> Any:
    try:
        from pytest_asyncio import fixture  # noqa: PLC0415 - it may not be there
    except ImportError:
        # A plug-in that runs async tests also runs async fixtures that plain pytest
        # defines.
        return pytest.fixture(function)
    return fixture(function)


@_async_fixture
async def kvwire_pair(kvwire_backend: str) -> AsyncIterator[Loopback]:
    """Yield two connected communicators; see :func:`kvwire.testing.loopback`.

    Cancel safety: safe, both are closed.
    """
    from kvwire.testing.harness import loopback  # noqa: PLC0415 - see the top

    async with loopback(kvwire_backend) as pair:
        yield pair
