"""Transfers between two kernels: frames travel, are lost and reordered.

Every block that is called landed has its bytes, and nothing is written after `drained`.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.hosts import MOVER, PATIENCE_S, PYTHON, Host, sent_packets
from tests.rdma.moves import MIB, half_way, pulled, serving

pytestmark = pytest.mark.timeout(1800)
WINDOWS = "warm tests.rdma.windows"
ENDS = "warm tests.rdma.ends"
OUTAGE_S = 5.0
RDMA_MTU_BYTES = 4096  # of rxe over this wire


def _over_verbs(transfers: list[dict[str, Any]], verbs: str = "rc_verbs") -> None:
    """The first of them, at least: a test over TCP alone would prove nothing here."""
    assert f"{verbs}/rxe0:1" in transfers[0]["way"], transfers[0]["way"]


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
    before = sent_packets(first) + sent_packets(second)
    for host in hosts:
        host.run(f"export UCX_TLS={transports},self UCX_NET_DEVICES=rxe0:1")
    with serving(first, "--count 3 --require"):
        printed = second.run(f"{MOVER} pull --count 3 --require")
    for host in hosts:
        host.run("unset UCX_TLS UCX_NET_DEVICES")

    transfers, summary = pulled(printed)
    assert summary["complete"] == 3
    _over_verbs(transfers, verbs)
    assert (
        sent_packets(first) + sent_packets(second) - before
        > summary["bytes"] // RDMA_MTU_BYTES
    )


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
        with serving(first, "--mib 2"):
            transfers, summary = pulled(second.run(f"{MOVER} pull --mib 2"))
    finally:
        for host in hosts:
            host.run("tc qdisc del dev eth0 root")
    _over_verbs(transfers)
    assert summary["complete"] == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_gib_on_a_bad_wire(hosts: tuple[Host, Host]) -> None:
    """In pieces of many sizes, with lost packets, and 5 s without a wire."""
    first, second = hosts
    options = "--mib 64 --count 16 --fragments 4 16 64 256 1024 --deadline 1200"
    for host in hosts:
        # A lost packet that none follows is sent again after this time; by default 1 s.
        host.run("export UCX_RC_TIMEOUT=50ms")
        host.run("tc qdisc add dev eth0 root netem loss 1%")
    try:
        with serving(first, options):
            second.start("reader", f"{MOVER} pull {options}")
            second.wait_for("reader", '{"transfer": 7', 1200)
            first.unplug(OUTAGE_S)
            printed = second.wait_for("reader", "rig-status 0", 1200)
    finally:
        for host in hosts:
            host.run("tc qdisc del dev eth0 root; unset UCX_RC_TIMEOUT")
    transfers, summary = pulled(printed)
    assert summary["complete"] == 16
    assert summary["bytes"] == 1 << 30
    for each in transfers:
        _over_verbs([each])


def test_readers_name_another_gid_or_device(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    with serving(first, f"--mib 2 --count 2 --deadline {PATIENCE_S:g}"):
        second.run("export UCX_IB_GID_INDEX=1")  # of IPv4
        printed = [second.run(f"{MOVER} pull --mib 2")]
        second.run("unset UCX_IB_GID_INDEX; rdma link del rxe0")
        second.run("rdma link add rxe7 type rxe netdev eth0")
        try:
            printed += [second.run(f"{MOVER} pull --mib 2 --start 1")]
        finally:
            second.run("rdma link del rxe7; rdma link add rxe0 type rxe netdev eth0")
    for text, device in zip(printed, ("rxe0", "rxe7"), strict=True):
        transfers, summary = pulled(text)
        assert summary["complete"] == 1
        assert f"rc_verbs/{device}:1" in transfers[0]["way"]


def test_a_reader_that_may_lock_little_memory_uses_tcp(
    hosts: tuple[Host, Host],
) -> None:
    """Root may lock any, unless it gives that up."""
    first, second = hosts
    with serving(first, f"--mib 2 --deadline {PATIENCE_S:g}"):
        limited = "ulimit -l 8192; setpriv --bounding-set=-ipc_lock"
        command = f"{limited} {PYTHON} -m tests.rdma.mover pull --mib 2"
        printed = second.run(f"({command})")
    transfers, summary = pulled(printed)
    assert summary["complete"] == 1
    assert "tcp: taken" in transfers[0]["way"]
    assert "may lock 8192 KiB" in transfers[0]["way"]


def _newer_ucx() -> str:
    """Return a command after which a guest uses the UCX of NIXL's wheel, with verbs.

    The wheel's own libibverbs finds no provider of Debian's, so in the guest Debian's
    takes its place. Nothing outside the guest changes.
    """
    spec = importlib.util.find_spec("nixl_cu12")
    if spec is None or spec.origin is None:
        pytest.skip("windows by verbs need UCX 1.19: `make test-rdma` installs NIXL's")
    libs = Path(spec.origin).parents[1] / "nixl_cu12.libs"
    (ucp,) = libs.glob("libucp-*.so.*")
    system = "/usr/lib/x86_64-linux-gnu"
    (verbs,) = libs.glob("libibverbs-*.so.*")
    (mlx5,) = libs.glob("libmlx5-*.so.*")
    return (
        f"ln -sf {system}/libibverbs.so.1 {verbs}; "
        f"ln -sf {system}/libmlx5.so.1 {mlx5}; export LIBUCP={ucp}"
    )


# --- windows --------------------------------------------------------------------------


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_a_window_is_read_by_rdma(hosts: tuple[Host, Host], planted: bool) -> None:
    """While its owner overwrites it: nothing stale or torn lands."""
    first, second = hosts
    for host in hosts:
        host.run(_newer_ucx())
    options = " --plant" if planted else ""
    first.start("owner", f"{WINDOWS} own")
    try:
        first.wait_for("owner", "listening")
        printed = second.run(f"{WINDOWS} read{options}", check=False)
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


# --- NIXL -----------------------------------------------------------------------------


@pytest.fixture
def nixl(hosts: tuple[Host, Host]) -> Iterator[str]:
    """Options of the mover with which NIXL alone moves blocks, and by verbs alone."""
    for host in hosts:
        host.run(_newer_ucx())
        host.run("export UCX_TLS=rc_verbs,ud_verbs,self UCX_NET_DEVICES=rxe0:1")
    yield "--over nixl --require"
    for host in hosts:
        host.run("unset LIBUCP UCX_TLS UCX_NET_DEVICES")


def test_nixl_moves_blocks_as_rdma_packets(hosts: tuple[Host, Host], nixl: str) -> None:
    first, second = hosts
    before = sent_packets(first) + sent_packets(second)
    with serving(first, f"{nixl} --count 2"):
        printed = second.run(f"{MOVER} pull {nixl} --count 2")
    transfers, summary = pulled(printed)
    assert summary["complete"] == 2
    assert "nixl: taken" in transfers[0]["way"]
    assert (
        sent_packets(first) + sent_packets(second) - before
        > summary["bytes"] // RDMA_MTU_BYTES
    )


def test_nixl_waits_for_a_port_that_is_down(
    hosts: tuple[Host, Host], nixl: str
) -> None:
    with serving(hosts[0], f"{nixl} --hold --mib {MIB}"):
        with half_way(hosts, nixl):
            hosts[0].unplug(OUTAGE_S)
        transfers, summary = pulled(hosts[1].printed("reader"))
    assert summary["complete"] == 1
    assert "nixl: taken" in transfers[0]["way"]


def test_a_dead_owner_leaves_nixl_s_reader_an_outcome_and_free_memory(
    hosts: tuple[Host, Host], nixl: str
) -> None:
    first, second = hosts
    options = f"{nixl} --hold --mib {MIB}"
    first.start("owner", f"{MOVER} serve {options}")
    second.start("reader", f"{MOVER} pull {options} --deadline 30 --watch 3")
    second.wait_for("reader", "half of 0")
    first.stop("owner", "KILL")
    transfers, _ = pulled(second.wait_for("reader", "rig-status 0"))
    assert transfers[0]["state"] == "partial"
    assert transfers[0]["why"]


@pytest.mark.parametrize("over", ["nixl", "ucx"])
def test_a_reader_that_gives_up_has_its_memory_to_itself(
    hosts: tuple[Host, Host], nixl: str, over: str
) -> None:
    """Once it has drained: what arrives later is not written."""
    # A lane has less in flight than a layer has bytes.
    options = f"{nixl.replace('nixl', over)} --mib 128"
    with serving(hosts[0], f"{options} --hold"):
        with half_way(hosts, f"{options} --give-up --watch 5"):
            pass
        transfers, _ = pulled(hosts[1].printed("reader"))
    assert transfers[0]["state"] == "partial"
    assert "gave up" in transfers[0]["why"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "case", "cached"),
    [
        ("nixl", "cancel", "y"),
        ("nixl", "withdraw", "y"),
        ("nixl", "stale", "y"),
        ("nixl", "stale", "n"),
        ("ucx", "stale", "y"),
        ("ucx", "stale", "n"),
    ],
)
def test_what_others_do_to_memory_over_verbs(
    hosts: tuple[Host, Host], nixl: str, target: str, case: str, cached: str
) -> None:
    """As docs/topics/certified.md has it: none of it is kvwire's."""
    first, second = hosts
    settings = f"UCX_RCACHE_ENABLE={cached} UCX_LOG_LEVEL=fatal"
    first.start("owner", f"{settings} {ENDS} own {target}")
    try:
        first.wait_for("owner", "listening")
        command = f"{settings} {ENDS} read {target} {case} 2>/dev/null"
        printed = second.run(command, check=False)
    finally:
        first.stop("owner", "KILL")
    (found,) = (line for line in printed.splitlines() if line.startswith("summary "))
    held = json.loads(found.removeprefix("summary "))
    if case == "cancel":
        assert held["get"] == "cancelled"
        assert held["first"]  # in memory that the reader had used again
    elif cached == "y":
        assert held["get"] == "landed: True"
        assert held["later"]
    else:
        assert "landed" not in held["get"]
        assert held["first"] == held["later"] == 0


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
    with serving(hosts[0], f"--hold --mib {MIB}"):
        with half_way(hosts):
            fault(*hosts)
        transfers, summary = pulled(hosts[1].printed("reader"))
    _over_verbs(transfers)
    assert summary["complete"] == 1


def test_a_device_that_is_removed_goes_with_its_last_user(
    hosts: tuple[Host, Host],
) -> None:
    """The kernel waits for the queue pairs, and the next process has only TCP."""
    first, second = hosts
    with serving(first, f"--hold --mib {MIB}"):
        with half_way(hosts):
            first.start("removal", "rdma link del rxe0")
        transfers, summary = pulled(second.printed("reader"))
    first.wait_for("removal", "rig-status 0")
    try:
        with serving(first, "--mib 2"):
            after, rest = pulled(second.run(f"{MOVER} pull --mib 2"))
    finally:
        first.run("rdma link add rxe0 type rxe netdev eth0")
    _over_verbs(transfers)
    assert "tcp: taken" in after[0]["way"]
    for found in (summary, rest):
        assert found["complete"] == 1


def test_an_owner_without_power_leaves_an_outcome_and_free_memory(
    hosts: tuple[Host, Host],
) -> None:
    """The last test of these two machines."""
    first, second = hosts
    first.start("owner", f"{MOVER} serve --hold --mib {MIB}")
    second.start("reader", f"{MOVER} pull --hold --mib {MIB} --deadline 30 --watch 3")
    second.wait_for("reader", "half of 0")
    first.kill()
    printed = second.wait_for("reader", "rig-status 0")
    transfers, _ = pulled(printed)
    assert transfers[0]["state"] == "partial"
    assert transfers[0]["why"]
