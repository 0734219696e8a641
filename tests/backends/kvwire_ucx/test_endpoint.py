"""Endpoints: how they end, and what they say that moves the bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvwire_ucx import endpoint as module
from kvwire_ucx.bootstrap import UcxBootstrap
from kvwire_ucx.endpoint import UcxEndpoint
from kvwire_ucx.library import Version
from kvwire_ucx.worker import Worker

PEER = UcxBootstrap(lane=1, version=Version(1, 15, 0), address=b"there")
# What ucp_ep_print_info says first; it goes on with thresholds and protocols.
OF_1_22 = """\
#                 lane[0]:  3:sysv/memory.0 md[2]   -> md[2]/sysv/sysdev[255] seg 42 am
#                 lane[1]:  4:posix/memory.0 md[3]  -> md[3]/posix/sysdev[255] seg 42
#                 lane[2]:  5:cma/memory.0 md[4]    -> md[4]/cma/sysdev[255] rma_bw#0
#
# |   Range   |                Description                 |   Config    |
# | 3598..inf | (?) rendezvous zero-copy read from remote  | cma/memory  |
"""
OF_1_13 = """\
#                 lane[0]:  0:tcp/lo.0 md[0]        -> md[0]/tcp/sysdev[255] am am_bw#0
#
#                  rma_bw: mds rndv_rkey_size 9
"""
TWO_PORTS = """\
#                 lane[0]:  0:tcp/eth0.0 md[0]      -> md[0]/tcp/sysdev[255] am
#                 lane[1]:  1:tcp/eth1.0 md[0]      -> md[0]/tcp/sysdev[255] rma_bw#0
#                 lane[2]:  1:tcp/eth1.1 md[0]      -> md[0]/tcp/sysdev[255] rma_bw#1
"""


class Asked:
    """A worker that only notes what is asked of it."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(
            library=SimpleNamespace(ucp=SimpleNamespace(ep_print_info=None))
        )
        self.connected: list[tuple[bytes, int]] = []
        self.disconnected: list[tuple[int, int, bool]] = []
        self.fail: Callable[[int], None] = lambda status: None
        self.gone: Callable[[int, int], None] = lambda status, nbytes: None

    def connect(self, address: bytes, number: int, on_failed: Any) -> int:
        self.connected.append((address, number))
        self.fail = on_failed
        return 4711

    def disconnect(
        self, handle: int, number: int, on_done: Any, *, force: bool
    ) -> None:
        self.disconnected.append((handle, number, force))
        self.gone = on_done


@pytest.fixture
def asked() -> Asked:
    return Asked()


def endpoint(asked: Asked, on_failed: Callable[[int], None] = print) -> UcxEndpoint:
    return UcxEndpoint(cast("Worker", asked), PEER, on_failed)


def test_each_has_a_number_of_its_own_and_an_address_with_an_end(asked: Asked) -> None:
    endpoint(asked)
    endpoint(asked)
    (address, first), (_, second) = asked.connected
    assert address == PEER.padded_address
    assert first != second


def test_what_moves_bulk_comes_first_and_is_known_after_the_end(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [OF_1_22]
    monkeypatch.setattr(module, "printed", lambda call, handle: said.pop())
    ours = endpoint(asked)
    assert ours.transports == ("cma", "sysv")
    ours.close(lambda: None)
    assert ours.transports == ("cma", "sysv"), "UCX is not asked about what is closed"


@pytest.mark.parametrize(
    ("text", "transports"),
    [
        ("", ()),
        (OF_1_13, ("tcp/lo",)),
        (OF_1_22, ("cma", "sysv")),
        (TWO_PORTS, ("tcp/eth1", "tcp/eth0")),
    ],
    ids=["nothing", "1.13", "1.22", "two-ports"],
)
def test_reading_what_ucx_prints(text: str, transports: tuple[str, ...]) -> None:
    """What moves bulk first, each once, and none that is for nothing."""
    assert module._transports(text) == transports
