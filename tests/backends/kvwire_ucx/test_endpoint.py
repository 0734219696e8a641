"""Endpoints: how they end, and what they say that moves the bytes."""

from __future__ import annotations

import pytest

from kvwire_ucx import endpoint as module

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
    assert module._transports(text) == transports
