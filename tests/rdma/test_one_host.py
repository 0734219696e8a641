"""The tests of the backend `ucx`, once more where UCX finds an RDMA device."""

import re

import pytest

from tests.rdma.hosts import PYTHON, Host

pytestmark = pytest.mark.timeout(1200)
# The device, and loopback for the tests that are about TCP.
DEVICES = "UCX_NET_DEVICES=rxe0:1,lo"
PYTEST = f"{DEVICES} {PYTHON} -m pytest -q -p no:cacheprovider --color=no"


OWN = (
    "tests/backends/kvwire_ucx/test_backend.py tests/backends/kvwire_ucx/test_lane.py "
    "tests/backends/kvwire_ucx/test_registration.py "
    "tests/backends/kvwire_ucx/test_worker.py"
)
KIT = (
    "tests/backends/kvwire_ucx/test_lane.py tests/backends/test_conformance.py "
    "tests/backends/test_transfers.py"
)
KILLS = "tests/backends/test_processes.py"
# UCX 1.13 ends the process if it frees a lane whose RC queue pairs never connected. So
# kvwire keeps such a lane, and the tests that count its descriptors find them.
NOT_OVER_RC = "ucx and not peer-gone"
# Checks that take longest, and are less about verbs than others.
LONG = "sixteen or changing or ping-pong or fair-other or cycles"


@pytest.mark.parametrize(
    ("loop", "tests", "which", "count"),
    [
        pytest.param(
            *("asyncio", KIT, f"{NOT_OVER_RC} and not ({LONG})", 50), id="rc_verbs"
        ),
        pytest.param("uvloop", OWN, "ucx", 30, id="ud_verbs"),
        pytest.param(
            *("asyncio", f"{KIT} {KILLS}", NOT_OVER_RC, 60),
            id="rc_kit",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("uvloop", f"{KIT} {KILLS}", "ucx", 50),
            id="ud_kit",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_backend_keeps_its_contract(
    host: Host, loop: str, tests: str, which: str, count: int
) -> None:
    """With a loop for each kind of queue pair: see `transports_of_this_loop`."""
    printed = host.run(
        f"{PYTEST} --durations 8 --loops {loop} -k {which!r} {tests}", 900, check=False
    )
    print(printed[-6000:])
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed
    assert int(passed[1]) >= count
    assert "failed" not in printed.splitlines()[-1]
    assert "error" not in printed.splitlines()[-1]


def test_rdma_that_is_required_and_gone_is_refused_by_name(host: Host) -> None:
    program = "from kvwire_ucx.context import Context; Context({'require_rdma': 'yes'})"
    command = f'{PYTHON} -c "{program}"'
    host.run(f"{DEVICES} {command}")
    printed = host.run(f"UCX_NET_DEVICES=lo {command}", check=False)
    assert "require_rdma: UCX" in printed
    assert "finds no RDMA device" in printed
