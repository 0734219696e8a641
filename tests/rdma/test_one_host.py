"""The tests of the backend `ucx`, once more where UCX finds an RDMA device."""

import re

import pytest

from tests.rdma.hosts import PYTHON, Host

pytestmark = pytest.mark.timeout(1200)
# The device, and loopback for the tests that are about TCP.
DEVICES = "UCX_NET_DEVICES=rxe0:1,lo"
PYTEST = f"{DEVICES} {PYTHON} -m pytest -q -p no:cacheprovider --color=no"


def test_the_backend_keeps_its_contract_over_ud_queue_pairs(host: Host) -> None:
    printed = host.run(
        f"{PYTEST} --loops uvloop -k ucx tests/backends/kvwire_ucx "
        "tests/backends/test_conformance.py tests/backends/test_transfers.py",
        1100,
        check=False,
    )
    print(printed[-4000:])
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed
    assert int(passed[1]) > 150
    assert "failed" not in printed.splitlines()[-1]
    assert "error" not in printed.splitlines()[-1]


def test_rdma_that_is_required_and_gone_is_refused_by_name(host: Host) -> None:
    program = "from kvwire_ucx.context import Context; Context({'require_rdma': 'yes'})"
    command = f'{PYTHON} -c "{program}"'
    host.run(f"{DEVICES} {command}")
    printed = host.run(f"UCX_NET_DEVICES=lo {command}", check=False)
    assert "require_rdma: UCX" in printed
    assert "finds no RDMA device" in printed
