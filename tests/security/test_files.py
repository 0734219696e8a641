"""Files with secrets: who may reach them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvwire import UsageError
from kvwire.security.files import read_file

GROUP = os.getegid()
OTHERS = (0o640, 0o604, 0o660, 0o620, 0o601)


@pytest.mark.parametrize(
    ("mode", "owner", "group", "user", "is_read"),
    [
        (0o600, 1000, GROUP, 1000, True),
        (0o400, 1000, GROUP, 1000, True),
        (0o440, 0, GROUP, 1000, True),  # a Secret of Kubernetes, with fsGroup
        (0o440, 0, GROUP + 100_000, 1000, False),
        (0o440, 1000, GROUP, 1000, False),
        (0o440, 0, GROUP, 0, False),
        (0o460, 0, GROUP, 1000, False),
        (0o444, 0, GROUP, 1000, False),
        *((mode, 1000, GROUP, 1000, False) for mode in OTHERS),
    ],
)
def test_who_may_reach_a_private_file(
    mode: int,
    owner: int,
    group: int,
    user: int,
    is_read: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"secret")
    status = os.stat_result((0o100000 | mode, 1, 1, 1, owner, group, 6, 0, 0, 0))
    monkeypatch.setattr("kvwire.security.files.os.fstat", lambda _: status)
    monkeypatch.setattr("kvwire.security.files.os.geteuid", lambda: user)
    assert read_file("tls_ca_file", str(path), 3) == b"sec"
    if is_read:
        assert read_file("psk_file", str(path), 9, private=True) == b"secret"
    else:
        with pytest.raises(UsageError, match=rf"psk_file .* mode {mode:04o} .*chmod"):
            read_file("psk_file", str(path), 9, private=True)
