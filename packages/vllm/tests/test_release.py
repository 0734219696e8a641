"""Releases of vLLM that are let through, and what is said of the others."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvwire.errors import UsageError
from kvwire_vllm.release import check_release, check_sleep


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.32.7+cpu", "0.33.0"])
def test_releases_that_were_tested(version: str) -> None:
    check_release(version, untested=False)


@pytest.mark.parametrize(
    "version", ["0.34.0", "0.34.0rc1.dev7+gabc", "0.29.9", "1.0.0", "0.4.2", "dev", ""]
)
def test_others_are_refused_by_name_unless_they_are_wanted(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError) as refused:
        check_release(version, untested=False)
    said = str(refused.value)
    assert said.startswith(f"vLLM {version}: kvwire was tested with 0.30 to 0.33")
    assert "pip install 'vllm>=0.30,<0.34'" in said
    assert '"untested_vllm": true' in said
    with caplog.at_level(logging.WARNING, "kvwire"):
        check_release(version, untested=True)
    assert f"vLLM {version}: " in caplog.text


def test_sleep_mode_is_refused() -> None:
    check_sleep(SimpleNamespace(enable_sleep_mode=False))
    check_sleep(SimpleNamespace())
    with pytest.raises(UsageError, match="without --enable-sleep-mode"):
        check_sleep(SimpleNamespace(enable_sleep_mode=True))
