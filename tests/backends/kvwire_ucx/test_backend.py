"""The entry point: what it offers, what it refuses, and what it tells the doctor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvwire_ucx import UcxBackend, diagnosis
from kvwire_ucx import backend as module
from kvwire_ucx import worker as endpoint_module
from kvwire_ucx.context import Context, Resource
from kvwire_ucx.lane import UcxLane
from kvwire_ucx.library import copies
from tests.backends.kvwire_ucx.support import needs_ucx
from tests.support.logs import logged


async def test_lanes_that_do_not_end_are_counted_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their context is not freed under them; those that have ended do not count."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.02)
    backend = UcxBackend()
    loop = asyncio.get_running_loop()

    class Stub:
        def __init__(self, *, ends: bool) -> None:
            self.ends = ends
            self.ended: asyncio.Future[None] = loop.create_future()

        def abort(self) -> None:
            if self.ends:
                loop.call_soon(self.end)

        def end(self) -> None:
            self.ended.set_result(None)
            backend._lanes.discard(cast("UcxLane", self))

    for ends in (True, False, True):
        backend._lanes.add(cast("UcxLane", Stub(ends=ends)))
    freed: list[str] = []
    context = SimpleNamespace(close=lambda: freed.append("the context"))
    backend._contexts[frozenset(), False] = cast("Context", context)
    await backend.aclose()
    (record,) = logged(caplog)
    assert record.getMessage() == "1 lanes have not ended, so UCX is not shut down"
    assert not freed


@needs_ucx
def test_the_doctor_is_told() -> None:
    findings = {finding.name: finding for finding in UcxBackend.diagnose()}
    assert findings["libucp"].text.startswith("UCX 1.")
    assert "tcp/lo" in findings["UCX transports"].text
    assert findings["RDMA"].state in ("ok", "warn")


MLX = Resource("rc_mlx5", "mlx5_0:1")
LO = Resource("tcp", "lo")


@pytest.mark.parametrize(
    ("devices", "resources", "knows", "state", "words"),
    [
        ((), (LO,), False, "ok", "no RDMA device"),
        (("mlx5_0",), (LO, MLX), True, "ok", "UCX uses rc_mlx5/mlx5_0:1"),
        (("mlx5_0",), (LO,), True, "warn", "cannot use it"),
        (("mlx5_0",), (LO,), False, "warn", "was built without RDMA"),
    ],
)
def test_rdma_that_is_not_used_is_a_finding(
    devices: tuple[str, ...],
    resources: tuple[Resource, ...],
    knows: bool,
    state: str,
    words: str,
) -> None:
    finding = diagnosis._rdma(resources, knows, devices)
    assert finding.state == state
    assert words in finding.text
    assert bool(finding.remedy) is (state == "warn")


@needs_ucx
def test_a_second_copy_of_ucx_is_a_finding(tmp_path: Path) -> None:
    other = tmp_path / "libucp-0a1b2c3d.so"
    other.touch()
    ours = copies()
    finding = diagnosis._copies([*ours, str(other)])
    assert finding.state == "warn"
    assert str(other) in finding.text


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
    assert endpoint_module._transports(text) == transports
