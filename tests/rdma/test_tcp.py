"""TCP, directories, clocks, names and identities between two kernels.

A wire that is cut, in one way or in both, or that swallows large packets; clocks that
differ by hours. Each pull is complete, or fails by name within its limit; its memory is
drained, and has no wrong byte.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.hosts import FIRST, MOVER, Host, let_pass
from tests.rdma.moves import half_way, pulled, serving
from tests.support.certificates import FAR, NEAR, Authority
from tests.support.servers import redis_program

pytestmark = pytest.mark.timeout(1800)
TCP = "--over tcp --mib 16"
PULL = f"{MOVER} pull {TCP} --mib 2"
# Shorter than the 15 s after which a silent peer counts as gone, and longer.
OUTAGE_S = 6.0
SILENCE_S = 25.0
DEADLINE_S = 30.0
HOUR_S = 3600


@contextmanager
def clock(host: Host, ahead_s: float) -> Iterator[None]:
    """A clock that differs from this machine's, as if somebody had set it."""
    if ahead_s:
        host.run(f"date -s @$(($(date +%s) + {ahead_s:.0f}))")
    try:
        yield
    finally:
        if ahead_s:
            host.run(f"date -s @$(($(date +%s) - {ahead_s:.0f}))")


@contextmanager
def variables(host: Host, **values: str) -> Iterator[None]:
    """Settings of kvwire in the environment of one host."""
    named = [f"KVWIRE_{name.upper()}" for name in values]
    for name, value in zip(named, values.values(), strict=True):
        host.run(f"export {name}={value}")
    try:
        yield
    finally:
        host.run(f"unset {' '.join(named)}")


@contextmanager
def sends(host: Host, how: str) -> Iterator[None]:
    """What a host sends goes through a queue of the kernel that loses packets."""
    host.run(f"tc qdisc add dev eth0 root {how}")
    try:
        yield
    finally:
        host.run("tc qdisc del dev eth0 root")


def only(printed: str) -> dict[str, Any]:
    """The only transfer, of which no byte is wrong."""
    (transfer,), _ = pulled(printed)
    return transfer


def failed(printed: str) -> str:
    """The only transfer has ended in time without all of its blocks; returns why."""
    (transfer,), summary = pulled(printed)
    assert transfer["state"] != "complete", transfer
    assert summary["seconds"] < 3 * DEADLINE_S
    return str(transfer["why"])


def test_memory_of_one_host_is_not_offered_to_another(hosts: tuple[Host, Host]) -> None:
    """Although both see the same files, and so the same machine id."""
    first, second = hosts
    with serving(first, "--over local --mib 2"):
        found = only(second.run(f"{MOVER} pull --over local --mib 2"))
    assert found["state"] == "complete"
    assert "local: refused" in found["way"]
    assert "the peer is on another host (boot id" in found["way"]


@pytest.mark.parametrize(
    "deaf", ["owner", "reader", pytest.param("both", marks=pytest.mark.slow)]
)
def test_an_outage_delays_a_transfer(hosts: tuple[Host, Host], deaf: str) -> None:
    """Of one direction, or of both."""
    first, second = hosts
    with serving(first, f"{TCP} --hold"):
        with half_way(hosts, TCP):
            cut = "netem loss 100%"
            with (
                sends(first, cut) if deaf != "owner" else nullcontext(),
                sends(second, cut) if deaf != "reader" else nullcontext(),
            ):
                let_pass(OUTAGE_S)
        assert only(second.printed("reader"))["state"] == "complete"


def test_hosts_that_were_apart_for_long_connect_again(
    hosts: tuple[Host, Host],
) -> None:
    """Each takes the other one for gone meanwhile."""
    first, second = hosts
    with serving(first, f"{TCP} --hold"):
        with half_way(hosts, TCP):
            first.unplug(SILENCE_S)
        assert only(second.printed("reader"))["state"] == "complete"


def test_a_partition_that_stays_ends_a_transfer_at_its_deadline(
    hosts: tuple[Host, Host],
) -> None:
    first, second = hosts
    options = f"{TCP} --mib 8 --deadline {DEADLINE_S}"
    with serving(first, f"{options} --hold"):
        try:
            with half_way(hosts, f"{options} --watch 2"):
                first.cable("off")
        finally:
            first.cable("on")
        assert "deadline" in failed(second.printed("reader"))


@pytest.mark.parametrize("stays", [True, False], ids=["stays", "goes"])
def test_a_wire_that_swallows_large_packets(
    hosts: tuple[Host, Host], stays: bool
) -> None:
    """The handshake passes, and so do pings; what carries data is lost."""
    first, second = hosts
    options = f"{TCP} --deadline {DEADLINE_S if stays else 600}"
    with serving(first, options):
        with sends(first, "tbf rate 1gbit burst 1514 limit 1mb"):
            second.start("reader", f"{MOVER} pull {options}")
            if stays:
                second.wait_for("reader", "rig-status 0")
            else:
                first.wait_for("owner", "is open for more than")
        printed = second.wait_for("reader", "rig-status 0")
        if stays:
            assert "deadline" in failed(printed)
        else:
            assert only(printed)["state"] == "complete"


@pytest.mark.parametrize("hours", [10, pytest.param(-10, marks=pytest.mark.slow)])
def test_a_clock_that_is_set_in_the_middle_changes_nothing(
    hosts: tuple[Host, Host], hours: int
) -> None:
    """Deadlines, leases and pings are measured, not read from the clock."""
    first, second = hosts
    with serving(first, f"{TCP} --hold"):
        with half_way(hosts, TCP), clock(second, hours * HOUR_S):
            let_pass(1)
        assert only(second.printed("reader"))["state"] == "complete"


@pytest.mark.parametrize(
    ("hours", "refused"),
    [
        (0, ""),
        pytest.param(10, "", marks=pytest.mark.slow),
        (72, "expired"),
        (-72, "not yet valid"),
    ],
)
def test_certificates_are_judged_by_the_reader_s_clock(
    hosts: tuple[Host, Host], hours: int, refused: str, tmp_path: Path
) -> None:
    """They are valid for a day before and after now."""
    first, second = hosts
    authority = Authority(tmp_path)
    sides = [authority.config(FAR, NEAR), authority.config(NEAR, FAR)]
    settings = [
        {
            name: text if isinstance(text, str) else text[0]
            for name, text in side.items()
        }
        for side in sides
    ]
    options = f"{TCP} --mib 2 --deadline {DEADLINE_S if refused else 600}"
    with (
        variables(first, **settings[0]),
        variables(second, **settings[1]),
        serving(first, options),
        clock(second, hours * HOUR_S),
    ):
        printed = second.run(f"{MOVER} pull {options}")
    if refused:
        assert refused in failed(printed)
    else:
        assert only(printed)["state"] == "complete"
        assert "inside TLS" in only(printed)["way"]


def test_an_owner_is_found_by_a_directory_whatever_the_clocks_say(
    hosts: tuple[Host, Host],
) -> None:
    """And by a name; once its lease has ended, no longer."""
    first, second = hosts
    first.start(
        "redis", f"{redis_program()} --protected-mode no --save '' --bind {FIRST}"
    )
    first.wait_for("redis", "Ready to accept")
    second.run(f"echo {FIRST} owner.test >>/etc/hosts")
    try:
        with (
            clock(second, 10 * HOUR_S),
            variables(first, directory=f"redis://{FIRST}"),
        ):
            with serving(first, f"{TCP} --mib 2 --count 2"):
                with variables(second, directory=f"redis://{FIRST}"):
                    assert only(second.run(PULL))["state"] == "complete"
                by_name = "'dns://owner.test:7400?role=owner'"
                with variables(second, directory=by_name):
                    printed = second.run(f"{PULL} --start 1")
                    assert only(printed)["state"] == "complete"
            with variables(second, directory=f"redis://{FIRST}"):
                why = failed(second.run(f"{PULL} --deadline {DEADLINE_S}"))
    finally:
        first.stop("redis", "KILL")
    assert "role=owner" in why
