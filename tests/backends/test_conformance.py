"""Every backend at hand keeps every promise of both kits: one test for each check.

The one for Unix sockets is a distribution of its own that `make test` installs. What is
left to `make test-all` differs from what `make test` runs in what other tests look at
as well: TLS, one way of reading alone, each check where every fourth has passed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from kvwire.backend import Backend, registry
from kvwire.config import Config
from kvwire.security.tls import CredentialFiles
from kvwire.types import Address
from kvwire_certify.conformance import CHECKS, Check, run_check
from kvwire_certify.conformance.runner import LANE_CHECKS, check_lanes
from kvwire_inproc import InprocBackend
from kvwire_local import LocalBackend
from kvwire_nixl import NixlBackend
from kvwire_tcp import TcpBackend
from kvwire_ucx import UcxBackend
from tests.backends.kvwire_nccl.fake import FakeBackend
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.backends.kvwire_ucx import support as ucx
from tests.support.certificates import FAR, Authority
from tests.support.depth import parameters
from tests.support.waiting import PATIENCE_S

THIRD_PARTY = "unix"
TCP = Address("tcp", "127.0.0.1")


class TlsBackend(TcpBackend):
    """TCP inside TLS, of one identity for both ends."""

    files: CredentialFiles

    def __init__(self) -> None:
        super().__init__()
        self.use_tls(self.files)


class Lanes(NamedTuple):
    """The lanes of a backend under test."""

    make: type[Backend]
    settings: Callable[[], dict[str, str]] = dict
    every: int = 1
    marks: tuple[Any, ...] = ()
    address: Address | None = None


LANES = {
    "inproc": Lanes(InprocBackend),
    "tcp": Lanes(TcpBackend, address=TCP),
    "tls": Lanes(TlsBackend, every=0, address=TCP),
    "local": Lanes(LocalBackend),
    "nccl": Lanes(FakeBackend, every=4),
    "ucx": Lanes(
        UcxBackend,
        lambda: {"TLS": ucx.transports_of_this_loop()},
        every=4,
        marks=(ucx.needs_ucx,),
    ),
}


# Their windows are those of `tcp`, `local` and `inproc`.
_AS_ANOTHER = ("tls", "local-arena", "nccl", "nixl")


def each_check(subjects: dict[str, Lanes]) -> list[pytest.ParameterSet]:
    """Each check of lanes with each subject."""
    found = []
    for name, lanes in subjects.items():
        for case in parameters(LANE_CHECKS, every=lanes.every or len(LANE_CHECKS)):
            marks = [*lanes.marks]
            # Each way of reading windows is read in each run.
            if (
                id_of(*case.values).partition(".")[0] != "windows"
                or name in _AS_ANOTHER
            ):
                marks += case.marks if lanes.every else [pytest.mark.matrix]
            found.append(
                pytest.param(
                    lanes, *case.values, marks=marks, id=f"{name}-{id_of(*case.values)}"
                )
            )
    return found


def id_of(check: Any) -> str:
    return str(check.id)


@pytest.fixture(scope="module", autouse=True)
def _tls(tmp_path_factory: pytest.TempPathFactory) -> None:
    authority = Authority(tmp_path_factory.mktemp("ca"))
    TlsBackend.files = CredentialFiles(Config(**authority.config(FAR, FAR)))


@pytest.fixture
def address(scheme: str) -> Iterable[Address]:
    """Any free address of a scheme."""
    if scheme == THIRD_PARTY:
        # Not `tmp_path`: the path of a Unix socket has 104 bytes on macOS.
        with tempfile.TemporaryDirectory(prefix="kvwire-") as folder:
            yield Address(scheme, f"{folder}/")
    else:
        yield Address("inproc", "") if scheme == "inproc" else TCP


@pytest.mark.parametrize("check", CHECKS, ids=id_of)
@pytest.mark.parametrize(
    "scheme",
    [
        "inproc",
        "tcp",
        pytest.param("tls", marks=pytest.mark.matrix),
        pytest.param(THIRD_PARTY, marks=pytest.mark.matrix),
    ],
)
async def test_links(scheme: str, check: Check, address: Address) -> None:
    if scheme == THIRD_PARTY and scheme not in registry.names():
        pytest.skip(
            "examples/third_party_backend is not installed; `make test` does it"
        )
    make = TlsBackend if scheme == "tls" else registry.load(scheme)
    result = await run_check(check, make, address, PATIENCE_S)
    assert result.passed, result.reason


@pytest.mark.parametrize(("lanes", "check"), each_check(LANES))
async def test_lanes(lanes: Lanes, check: Check) -> None:
    await check_one(lanes, check)


# What treats all loops alike, or takes long: each check makes agents of NIXL, and each
# agent a context of UCX.
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize(
    ("lanes", "check"),
    each_check(
        {
            "local-cma": Lanes(LocalBackend, lambda: {"way": "cma"}, every=0),
            "local-arena": Lanes(LocalBackend, lambda: {"way": "arena"}, every=0),
            "nixl": Lanes(NixlBackend, every=8, marks=(needs_nixl,)),
        }
    ),
)
async def test_lanes_on_one_loop(lanes: Lanes, check: Check) -> None:
    await check_one(lanes, check)


async def check_one(lanes: Lanes, check: Check) -> None:
    await check_lanes(
        lanes.make,
        settings=lanes.settings(),
        address=lanes.address,
        only=[check.id],
        timeout_s=PATIENCE_S,
    )
