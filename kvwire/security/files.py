"""Files with secrets: read once, within a limit, and only if nobody else can."""

from __future__ import annotations

import os
import stat

from kvwire.errors import UsageError


def read_file(
    option: str, path: str, bytes_max: int, *, private: bool = False
) -> bytes:
    """Read a file that an option names, up to so many bytes."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - fstat the file that is read
            status = os.fstat(file.fileno())
            content = file.read(bytes_max)
    except OSError as exc:
        raise UsageError(f"{option} {path}: {exc.strerror}") from None
    if private and not _is_private(status):
        mode = stat.S_IMODE(status.st_mode)
        raise UsageError(
            f"{option} {path} has mode {mode:04o} and others can read it: chmod 600 it"
        )
    return content


def _is_private(status: os.stat_result) -> bool:
    """Tell whether only this user can reach a file.

    Kubernetes gives a pod that does not run as root its Secrets as files of root's that
    the pod's group (``fsGroup``) may read, and no other way is there.
    """
    others = status.st_mode & 0o077
    is_lent = others == stat.S_IRGRP and status.st_uid == 0 and os.geteuid() != 0
    return not others or (is_lent and status.st_gid in {os.getegid(), *os.getgroups()})
