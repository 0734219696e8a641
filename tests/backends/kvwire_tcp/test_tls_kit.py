"""Links and lanes inside TLS against both conformance kits, over real sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvwire.config import Config
from kvwire.security.tls import CredentialFiles
from kvwire.testing.conformance import CHECKS, Check, run_check
from kvwire.testing.conformance.lanes import LANE_CHECKS, run_lane_check
from kvwire.testing.conformance.lanes.rig import LaneCheck
from kvwire.types import Address
from kvwire_tcp import TcpBackend
from tests.backends.kvwire_tcp.recorder import ANYWHERE
from tests.support.certificates import FAR, Authority

Make = Callable[[], TcpBackend]

# The kits without TLS are in `make test`, and so is what TLS does: test_tls_wire.py.
pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a backend inside TLS, of one identity for both ends."""
    authority = Authority(tmp_path_factory.mktemp("ca"))
    files = CredentialFiles(Config(**authority.config(FAR, FAR)))

    class TlsBackend(TcpBackend):
        def __init__(self) -> None:
            super().__init__()
            self.use_tls(files)

    return TlsBackend


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
async def test_links_keep_every_promise(check: Check, make: Make) -> None:
    result = await run_check(check, make, Address("tcp", "127.0.0.1"))
    assert result.passed, result.reason


@pytest.mark.parametrize("check", LANE_CHECKS, ids=lambda check: check.id)
async def test_lanes_keep_every_promise(check: LaneCheck, make: Make) -> None:
    result = await run_lane_check(check, make, address=ANYWHERE)
    assert result.passed, result.reason
