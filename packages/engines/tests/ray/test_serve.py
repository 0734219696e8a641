"""examples/ray_serve.py on a local Ray: replicas that come, go and are killed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.runs import ran
from tests.support.servers import free_port
from tests.support.tree import ROOT


@pytest.mark.slow
def test_texts_are_whole_while_replicas_come_go_and_are_killed(tmp_path: Path) -> None:
    """The example compares each text with one process alone."""
    for name in ("ray.serve", "torch"):
        pytest.importorskip(name, reason=f"{name} is not installed; `make test-ray`")
    program = [sys.executable, str(ROOT / "examples" / "ray_serve.py")]
    done = ran(
        *program,
        "--kill",
        "4",
        "--requests",
        "32",
        "--http",
        str(free_port()),
        cwd=tmp_path,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    found = re.search(r"(\d+) texts, each the same as from one process alone", said)
    assert found, said
    texts = int(found[1])
    assert texts >= 32
    assert texts % 32 == 0
    assert "killed one" in said
    counts = [int(one) for one in re.findall(r"replicas of prefill: (\d)", said)]
    assert max(counts) > 1  # it has grown: the load goes on until then
    assert counts[-1] == 1  # and shrunk
    moved = re.search(r"(\d+) tokens received, (\d+) computed by decode", said)
    assert moved
    received, computed = map(int, moved.groups())
    assert received + computed == texts * 399  # each once, by one side or the other
    # A replica is killed between two chunks of a prompt: the second is decode's to do.
    assert computed > 0
