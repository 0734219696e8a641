"""Files whose pages are dropped, and those whose pages stay."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvwire.cli.bench.sides.page_cache import can_drop, drop
from kvwire.limits import MIB

if sys.platform != "linux":
    pytest.skip("only Linux says which pages are in memory", allow_module_level=True)


def test_a_tmpfs_keeps_its_pages(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("there is no /dev/shm here")
    assert not can_drop(shared)
    assert list(tmp_path.iterdir()) == []


def test_what_was_dropped_is_still_there(tmp_path: Path) -> None:
    if not can_drop(tmp_path):
        pytest.skip(f"{tmp_path} lies where nobody can drop pages")
    file, data = tmp_path / "file", os.urandom(1 * MIB)
    file.write_bytes(data)
    drop(file)
    assert file.read_bytes() == data


def test_pages_that_stay_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 * MIB))
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    with pytest.raises((RuntimeError, OSError)):
        drop(file)
    assert not can_drop(tmp_path)


def test_where_nobody_can_tell_nothing_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert not can_drop(tmp_path)
