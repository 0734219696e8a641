"""Transfers between two kernels: frames travel, are lost and reordered.

Every block that is called landed has its bytes, and nothing is written after `drained`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.rdma.hosts import PYTHON, Host

pytestmark = pytest.mark.timeout(600)
MOVER = f"{PYTHON} -m tests.rdma.mover"
MTU_BYTES = 1024  # of rxe over a wire of 1,500 bytes


def _packets(host: Host) -> int:
    counters = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
    return int(host.run(f"cat {counters}/sent_pkts"))


@contextmanager
def _serving(first: Host, *options: str) -> Iterator[None]:
    first.start("owner", " ".join([MOVER, "serve", *options]))
    try:
        first.wait_for("owner", "listening")
        yield
    finally:
        first.stop("owner", "KILL")


def _pulled(printed: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The transfers, and what they came to."""
    lines = printed.splitlines()
    transfers = [json.loads(line) for line in lines if line.startswith("{")]
    found = [line for line in lines if line.startswith("summary ")]
    assert found, f"the reader came to no end:\n{printed}"
    return transfers, json.loads(found[0].removeprefix("summary "))


def _over_verbs(transfers: list[dict[str, Any]], verbs: str = "rc_verbs") -> None:
    """The first of them, at least: a test over TCP alone would prove nothing here."""
    assert f"{verbs}/rxe0:1" in transfers[0]["way"], transfers[0]["way"]


def _nothing_wrong(summary: dict[str, Any]) -> None:
    assert summary["wrong"] == 0
    assert summary["late"] == 0


# UCX connects its RC queue pairs over UD ones.
@pytest.mark.parametrize(
    ("verbs", "transports"),
    [("rc_verbs", "rc_verbs,ud_verbs"), ("ud_verbs", "ud_verbs")],
    ids=["rc", "ud"],
)
def test_blocks_travel_as_rdma_packets(
    hosts: tuple[Host, Host], verbs: str, transports: str
) -> None:
    first, second = hosts
    before = _packets(first) + _packets(second)
    for host in hosts:
        host.run(f"export UCX_TLS={transports},self UCX_NET_DEVICES=rxe0:1")
    with _serving(first, "--count 3 --require"):
        printed = second.run(f"{MOVER} pull --count 3 --require")
    for host in hosts:
        host.run("unset UCX_TLS UCX_NET_DEVICES")

    transfers, summary = _pulled(printed)
    _nothing_wrong(summary)
    assert summary["complete"] == 3
    _over_verbs(transfers, verbs)
    assert _packets(first) + _packets(second) - before > summary["bytes"] // MTU_BYTES


@pytest.mark.parametrize(
    "impairment",
    ["loss 1%", "delay 2ms reorder 1%"],
    ids=["lost", "reordered"],
)
def test_an_impaired_wire_changes_no_byte(
    hosts: tuple[Host, Host], impairment: str
) -> None:
    first, second = hosts
    for host in hosts:
        host.run(f"tc qdisc add dev eth0 root netem {impairment}")
    try:
        with _serving(first, "--count 2"):
            transfers, summary = _pulled(second.run(f"{MOVER} pull --count 2", 300))
    finally:
        for host in hosts:
            host.run("tc qdisc del dev eth0 root")
    _over_verbs(transfers)
    _nothing_wrong(summary)
    assert summary["complete"] == 2
