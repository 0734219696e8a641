"""What the plugin of reruns does, in a run of its own."""

from __future__ import annotations

import pytest

from tests.support.tree import ROOT


def test_each_run_of_a_test_that_hangs_is_ended(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile("import time\ndef test(): time.sleep(60)")
    plugins = ("timeout", "rerunfailures", "tests.support.reruns")
    options = [word for name in plugins for word in ("-p", name)]
    result = pytester.runpytest_subprocess(*options, "--timeout=0.5", "--reruns=1")
    outcomes = result.parseoutcomes()
    assert (outcomes["rerun"], outcomes["failed"]) == (1, 1)
