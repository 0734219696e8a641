"""The backend `ucx` where UCX finds an RDMA device: its own tests, the kit of lanes."""

import json
import re

import pytest

from tests.rdma.hosts import PYTHON, Host, sent_packets

pytestmark = pytest.mark.timeout(3000)
# The device, and loopback for the tests that are about TCP.
DEVICES = "UCX_NET_DEVICES=rxe0:1,lo"
# The process that forks has imported pytest.
PYTEST = (
    "warm pytest -W ignore::pytest.PytestAssertRewriteWarning -q -p no:cacheprovider "
    "--color=no --durations 8"
)
OWN = (
    "tests/backends/kvwire_ucx/test_backend.py tests/backends/kvwire_ucx/test_lane.py "
    "tests/backends/kvwire_ucx/test_registration.py "
    "tests/backends/kvwire_ucx/test_worker.py tests/backends/test_transfers.py"
)
# UCX 1.13 ends the process if it frees a lane whose RC queue pairs never connected. So
# kvwire keeps such a lane, and the checks of joins count what it holds.
WHICH = "ucx and not has_just_connected and not (uvloop and drained)"
NO_JOINS = "[!j]*"
KILLS = "tests/backends/test_processes.py"
KIT = "warm kvwire.cli.main certify backend ucx --lanes --timeout 300"
# UCX connects RC queue pairs over UD ones, and prefers the former.
RC = "--setting TLS=self,ud_verbs,rc_verbs --loop asyncio"
UD = "--setting TLS=self,ud_verbs --loop uvloop"


@pytest.mark.parametrize(
    ("tests", "count"),
    [
        pytest.param(OWN, 75, id="own"),
        pytest.param(KILLS, 8, id="kills", marks=pytest.mark.slow),
    ],
)
def test_tests_of_the_backend_pass_over_verbs(
    host: Host, tests: str, count: int
) -> None:
    """RC on one loop and UD on the other: see `transports_of_this_loop`."""
    command = f"{DEVICES} {PYTEST} --loops asyncio,uvloop -k '{WHICH}' {tests}"
    printed = host.run(command, 2400, check=False)
    print(printed[-6000:])
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed
    assert int(passed[1]) >= count
    assert "failed" not in printed.splitlines()[-1]
    assert "error" not in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("way", "which", "count"),
    [
        pytest.param(RC, "memory.*", 20, id="rc_verbs"),
        pytest.param(UD, "abort.*", 24, id="ud_verbs"),
        pytest.param(RC, NO_JOINS, 162, id="rc_kit", marks=pytest.mark.slow),
        pytest.param(UD, "*", 172, id="ud_kit", marks=pytest.mark.slow),
    ],
)
def test_lanes_keep_their_promises_over_verbs(
    host: Host, way: str, which: str, count: int
) -> None:
    printed = host.run(f"{DEVICES} {KIT} {way} --only '{which}'", 2400)
    all_passed = re.search(r"(\d+) of \1 checks passed", printed)
    assert all_passed, printed
    assert int(all_passed[1]) >= count


@pytest.mark.parametrize(
    "schedules", [3, pytest.param(50, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_certify_finds_nothing_over_verbs(host: Host, schedules: int) -> None:
    """Cancels, time limits, kills and reconnects, and every byte of both ends."""
    before = sent_packets(host)
    verbs = "UCX_NET_DEVICES=rxe0:1 UCX_TLS=self,ud_verbs,rc_verbs"
    command = f"certify kvwire:ucx --schedules {schedules} --limit 60 --json"
    printed = host.run(
        f"{verbs} warm kvwire.cli.main {command} --into /run 2>/run/certify.log", 2400
    )
    found = json.loads(printed)
    assert found["schedules"] == schedules
    assert found["operations"] > 0
    assert found["breaches"] == []
    assert sent_packets(host) - before > found["operations"]


def test_rdma_that_is_required_and_gone_is_refused_by_name(host: Host) -> None:
    program = "from kvwire_ucx.context import Context; Context({'require_rdma': 'yes'})"
    command = f'{PYTHON} -c "{program}"'
    host.run(f"{DEVICES} {command}")
    printed = host.run(f"UCX_NET_DEVICES=lo {command}", check=False)
    assert "require_rdma: UCX" in printed
    assert "finds no RDMA device" in printed
