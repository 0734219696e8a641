"""Whether RDMA may lock the buffers of a lane: the kernel is asked, and believed."""

import re
import subprocess
import sys

import pytest

from kvwire.limits import KIB, MIB
from kvwire_ucx.locked import UNLIMITED, too_little_to_lock

LIMIT = 8 * MIB
# What is true of a process that has lowered its limit.
ASKING = f"""
import resource
from kvwire_ucx.locked import lock_limit
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({LIMIT}, {LIMIT}))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(lock_limit(), int(status["CapEff"], 16) >> 14 & 1)
"""


@pytest.mark.parametrize(
    ("limit", "pinned", "refused"),
    [
        (64 * KIB, 0, r"may lock 64 KiB, .* raise `ulimit -l`"),
        (8 * MIB, 0, "may lock 8192 KiB"),
        (128 * MIB, 100 * MIB, "131072 KiB, of which 102400 KiB are in use"),
        (128 * MIB, 0, ""),
        (UNLIMITED, 100 * MIB, ""),
    ],
    ids=["64K", "8M", "in use", "enough", "unlimited"],
)
def test_no_worker_is_opened_for_which_rdma_may_lock_too_little(
    limit: int, pinned: int, refused: str
) -> None:
    """UCX 1.13 would try to register its buffers for ever, on the event loop."""
    found = too_little_to_lock(limit, pinned)
    assert re.search(refused, found) if refused else not found


def test_root_of_a_rootless_container_has_a_limit() -> None:
    """Though its capabilities say otherwise: they hold in its own namespace."""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", ASKING]
    try:
        found = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no `unshare` here, of util-linux")
    if found.stderr.startswith("unshare:"):
        pytest.skip(f"no user namespace may be made here: {found.stderr}")
    assert found.stdout.split() == [str(LIMIT), "1"], found.stderr
