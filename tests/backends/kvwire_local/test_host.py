"""Whether a Unix socket can lead to the peer, told from what it says of its host."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from kvwire.errors import BackendUnavailable
from kvwire_local import host as host_module
from kvwire_local.host import Host

BOOT = uuid.UUID("a5a5a5a5-0000-4000-8000-000000000001").bytes
OTHER_BOOT = uuid.UUID("5b5b5b5b-0000-4000-8000-000000000002").bytes


def test_a_process_is_where_it_is() -> None:
    here = Host.here()
    here.require_same(Host.here())
    assert Host.decode(here.encode()) == here


def test_another_host_is_said_with_both_boot_ids() -> None:
    with pytest.raises(BackendUnavailable, match=r"5b5b5b5b, here a5a5a5a5"):
        Host(BOOT, 1).require_same(Host(OTHER_BOOT, 1))


def test_another_network_namespace_is_said_with_the_remedy() -> None:
    with pytest.raises(BackendUnavailable, match=r"\(2, here 1\); run both containers"):
        Host(BOOT, 1).require_same(Host(BOOT, 2))


@pytest.mark.parametrize("content", [None, "", "not a uuid\n"])
def test_a_system_that_does_not_say_where_it_is_has_no_local(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No /proc at all, or one with something else in it."""
    boot_id = tmp_path / "boot_id"
    if content is not None:
        boot_id.write_text(content)
    monkeypatch.setattr(host_module, "_BOOT_ID", boot_id)
    with pytest.raises(BackendUnavailable, match="on which host this is"):
        Host.here()


def test_without_a_network_namespace_there_is_no_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "_NETWORK", tmp_path / "net")
    with pytest.raises(BackendUnavailable, match="on which host this is"):
        Host.here()
