"""Folders that only this user may enter, for sockets, addresses and records.

Every user can create a folder in ``/tmp`` and controls its content. So a folder is
checked, without following links, before its content is trusted.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from kvwire.errors import UsageError


def own_folder(folder: Path, called: str) -> Path:
    """Return a folder that only this user can enter; create it if necessary.

    Args:
        folder: Its path.
        called: The folder's name in errors, such as ``inspect='/run/me'``.

    Raises:
        UsageError: It belongs to another user, is open to others, is not a folder, or
            cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise UsageError(f"{called}: {exc.strerror}") from None
    if stat.S_ISLNK(found.st_mode):
        fault = "it is a symbolic link: name the folder itself"
    elif not stat.S_ISDIR(found.st_mode):
        fault = "it is not a folder"
    elif found.st_uid != os.geteuid():
        fault = (
            f"it belongs to user {found.st_uid}, and this process is user "
            f"{os.geteuid()}: remove it, or name another"
        )
    elif found.st_mode & 0o077:
        fault = f"others may enter it (mode {found.st_mode & 0o777:o}): chmod 700"
    else:
        return folder
    raise UsageError(
        f"{called}: it must be a folder that only this user can enter; {fault}"
    )


def user_folder() -> Path:
    """Return the path of the folder that all processes of this user share.

    It is in ``XDG_RUNTIME_DIR`` if this user owns that folder (after ``su``, another
    user may own it), otherwise among the host's temporary files.

    Raises:
        UsageError: There is no folder for temporary files.
    """
    run = os.environ.get("XDG_RUNTIME_DIR")
    if run and _is_own(run):
        return Path(run) / "kvwire"
    return temporary_folder()


def temporary_folder() -> Path:
    """Return the path of this user's folder among the host's temporary files.

    Raises:
        UsageError: There is no folder for temporary files.
    """
    try:
        temporary = tempfile.gettempdir()
    except OSError as exc:
        raise UsageError(
            "found no writable folder for temporary files: set XDG_RUNTIME_DIR or "
            f"TMPDIR to one ({exc.strerror or exc})"
        ) from None
    return Path(temporary) / f"kvwire-{os.geteuid()}"


def _is_own(folder: str) -> bool:
    try:
        found = os.stat(folder)  # noqa: PTH116 - a path from the environment
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
