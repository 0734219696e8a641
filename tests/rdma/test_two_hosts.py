"""Transfers between two kernels: frames travel, are lost and reordered.

Every block that is called landed has its bytes, and nothing is written after `drained`.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.rdma.hosts import PYTHON, Host, newer_ucx

pytestmark = pytest.mark.timeout(600)
MOVER = f"{PYTHON} -m tests.rdma.mover"
WINDOWS = f"{PYTHON} -m tests.rdma.windows"
BLOCKS = 128
OUTAGE_S = 5.0
PATIENCE_S = 600.0
MTU_BYTES = 1024  # of rxe over a wire of 1,500 bytes


def _packets(host: Host) -> int:
    counters = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
    return int(host.run(f"cat {counters}/sent_pkts"))


@contextmanager
def _serving(first: Host, options: str) -> Iterator[None]:
    """An owner, whom nothing but the end of the block ends."""
    first.start("owner", f"{MOVER} serve {options}")
    try:
        first.wait_for("owner", "listening")
        yield
        first.stop("owner", "TERM")
        first.wait_for("owner", "rig-status 0")
    finally:
        first.stop("owner", "KILL")


@contextmanager
def _half_way(hosts: tuple[Host, Host]) -> Iterator[None]:
    """A reader that has half of a transfer, and an owner that then sends the rest."""
    first, second = hosts
    second.start("reader", f"{MOVER} pull --hold --blocks {BLOCKS}")
    second.wait_for("reader", "half of 0", PATIENCE_S)
    first.stop("owner", "USR1")
    yield
    second.wait_for("reader", "rig-status 0", PATIENCE_S)


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
    [
        pytest.param("loss 1%", id="lost"),
        pytest.param("delay 2ms reorder 1%", id="reordered", marks=pytest.mark.slow),
    ],
)
def test_an_impaired_wire_changes_no_byte(
    hosts: tuple[Host, Host], impairment: str
) -> None:
    first, second = hosts
    for host in hosts:
        host.run(f"tc qdisc add dev eth0 root netem {impairment}")
    try:
        with _serving(first, "--blocks 8"):
            transfers, summary = _pulled(second.run(f"{MOVER} pull --blocks 8", 300))
    finally:
        for host in hosts:
            host.run("tc qdisc del dev eth0 root")
    _over_verbs(transfers)
    _nothing_wrong(summary)
    assert summary["complete"] == 1


def test_readers_name_another_gid_or_device(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    with _serving(first, f"--blocks 8 --count 2 --deadline {PATIENCE_S:g}"):
        second.run("export UCX_IB_GID_INDEX=1")  # of IPv4
        printed = [second.run(f"{MOVER} pull --blocks 8", PATIENCE_S)]
        second.run("unset UCX_IB_GID_INDEX; rdma link del rxe0")
        second.run("rdma link add rxe7 type rxe netdev eth0")
        try:
            printed += [second.run(f"{MOVER} pull --blocks 8 --start 1", PATIENCE_S)]
        finally:
            second.run("rdma link del rxe7; rdma link add rxe0 type rxe netdev eth0")
    for text, device in zip(printed, ("rxe0", "rxe7"), strict=True):
        transfers, summary = _pulled(text)
        _nothing_wrong(summary)
        assert summary["complete"] == 1
        assert f"rc_verbs/{device}:1" in transfers[0]["way"]


def test_a_reader_that_may_lock_little_memory_uses_tcp(
    hosts: tuple[Host, Host],
) -> None:
    """Root may lock any, unless it gives that up."""
    first, second = hosts
    with _serving(first, f"--blocks 8 --deadline {PATIENCE_S:g}"):
        limited = "ulimit -l 8192; setpriv --bounding-set=-ipc_lock"
        printed = second.run(f"({limited} {MOVER} pull --blocks 8)", PATIENCE_S)
    transfers, summary = _pulled(printed)
    _nothing_wrong(summary)
    assert summary["complete"] == 1
    assert "tcp: taken" in transfers[0]["way"]
    assert "may lock 8192 KiB" in transfers[0]["way"]


# --- windows --------------------------------------------------------------------------


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_a_window_is_read_by_rdma(hosts: tuple[Host, Host], planted: bool) -> None:
    """While its owner overwrites it: nothing stale or torn lands."""
    first, second = hosts
    for host in hosts:
        host.run(newer_ucx())
    options = " --plant" if planted else ""
    first.start("owner", f"{WINDOWS} own")
    try:
        first.wait_for("owner", "listening")
        printed = second.run(f"{WINDOWS} read{options}", PATIENCE_S, check=False)
        first.wait_for("owner", "rig-status 0")
    finally:
        first.stop("owner", "KILL")
        for host in hosts:
            host.run("unset LIBUCP")
    found = printed.partition("summary ")[2].splitlines()
    assert found, printed
    summary = json.loads(found[0])
    print(summary)
    assert "rc_verbs/rxe0:1" in summary["way"]
    assert summary["by ucx"] == summary["landed"] + summary["missing"]
    assert bool(summary["wrong"]) is planted
    assert bool(summary["missing"]) is not planted


# --- faults in the middle of a transfer -----------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda owner, reader: owner.unplug(OUTAGE_S), id="cable"),
        pytest.param(lambda owner, reader: reader.stand_still(OUTAGE_S), id="reader"),
        pytest.param(
            lambda owner, reader: owner.stand_still(OUTAGE_S),
            id="owner",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_outage_of_seconds_delays_a_transfer(
    hosts: tuple[Host, Host], fault: Callable[[Host, Host], None]
) -> None:
    with _serving(hosts[0], f"--hold --blocks {BLOCKS}"):
        with _half_way(hosts):
            fault(*hosts)
        transfers, summary = _pulled(hosts[1].printed("reader"))
    _over_verbs(transfers)
    _nothing_wrong(summary)
    assert summary["complete"] == 1


def test_a_device_that_is_removed_goes_with_its_last_user(
    hosts: tuple[Host, Host],
) -> None:
    """The kernel waits for the queue pairs, and the next process has only TCP."""
    first, second = hosts
    with _serving(first, f"--hold --blocks {BLOCKS}"):
        with _half_way(hosts):
            first.start("removal", "rdma link del rxe0")
        transfers, summary = _pulled(second.printed("reader"))
    first.wait_for("removal", "rig-status 0")
    try:
        with _serving(first, "--blocks 8"):
            after, rest = _pulled(second.run(f"{MOVER} pull --blocks 8"))
    finally:
        first.run("rdma link add rxe0 type rxe netdev eth0")
    _over_verbs(transfers)
    assert "tcp: taken" in after[0]["way"]
    for found in (summary, rest):
        _nothing_wrong(found)
        assert found["complete"] == 1


def test_an_owner_without_power_leaves_an_outcome_and_free_memory(
    hosts: tuple[Host, Host],
) -> None:
    """The last test of these two machines."""
    first, second = hosts
    first.start("owner", f"{MOVER} serve --hold --blocks {BLOCKS}")
    first.wait_for("owner", "listening")
    second.start(
        "reader", f"{MOVER} pull --hold --blocks {BLOCKS} --deadline 30 --watch 3"
    )
    second.wait_for("reader", "half of 0", PATIENCE_S)
    first.kill()
    printed = second.wait_for("reader", "rig-status 0", PATIENCE_S)
    transfers, summary = _pulled(printed)
    _nothing_wrong(summary)
    assert transfers[0]["state"] == "partial"
    assert transfers[0]["why"]
