"""On a GPU: windows between two processes, by CUDA IPC."""

from __future__ import annotations

import pytest

from tests.gpu.devices import Gpu
from tests.support.runs import python

pytestmark = [pytest.mark.gpu]


def test_windows_between_two_processes() -> None:
    Gpu("torch")
    done = python("-m", "tests.gpu.windows", check=True)
    assert "0 wrong" in done.stdout
    assert "the device of the reader still works" in done.stdout
