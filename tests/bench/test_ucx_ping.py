import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.kvwire_ucx.support import needs_ucx
from tests.bench.ucx_ping import WIRES

pytestmark = needs_ucx


@pytest.mark.slow
def test_every_way_is_measured() -> None:
    """In a process of its own: it forks, and this one may have used UCX."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.bench.ucx_ping", "--json"),
            *("--count", "50", "--idle-s", "0.01"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(one["way"], one["wire"]) for one in found} == {
        *(("eager", wire) for wire in WIRES),
        *(("payload", wire) for wire in WIRES),
        ("pipe", ""),
    }
    for one in found:
        assert 0 < one["median_s"] <= one["p99_s"]
        assert one["idle_cpu"] >= 0
