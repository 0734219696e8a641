"""The smallest example, in two processes as its first lines say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.tree import ROOT

# Two interpreters are started, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(60)

PROGRAM = [sys.executable, "-W", "error", str(ROOT / "examples" / "hello.py")]


def test_prefill_writes_what_decode_lends() -> None:
    with subprocess.Popen(
        [*PROGRAM, "decode"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as decode:
        assert decode.stdout is not None
        address = decode.stdout.readline().strip()
        prefill = subprocess.run(
            [*PROGRAM, "prefill", address],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        said, errors = decode.communicate(timeout=30)
    assert (prefill.returncode, prefill.stdout, prefill.stderr) == (0, "", "")
    assert (decode.returncode, errors) == (0, "")
    assert said.splitlines() == [
        "prefill-0 over tcp: block 3 is written",
        "block 3 is there",
        "its neighbours are whole",
    ]


def test_called_wrong_it_says_how() -> None:
    done = subprocess.run(PROGRAM, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "hello.py decode" in done.stderr
