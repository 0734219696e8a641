"""Real actors of a local Ray: see actors.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("actors.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensors_go_from_actor_to_actor() -> None:
    for name in ("ray", "torch"):
        pytest.importorskip(name, reason=f"{name} is not installed; `make test-ray`")
    done = subprocess.run(
        [sys.executable, PROGRAM],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = re.findall(r"^    (\w+),$", PROGRAM.read_text(), re.MULTILINE)
    assert len(checks) == 6
    # Ray has lines of its own there.
    assert [one for one in done.stdout.splitlines() if one in checks] == checks
