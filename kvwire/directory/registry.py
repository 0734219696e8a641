"""Finds the kinds of directories in the entry-point group ``kvwire.directories``.

A kind's name is the scheme of its URLs. kvwire's own kinds are found in the same way as
those of other distributions, and also without its metadata.
"""

from __future__ import annotations

from typing import Final

from kvwire.directory.base import Directory
from kvwire.errors import BackendUnavailable, UsageError
from kvwire.extras import PlugInError, offered, plug_in

GROUP: Final = "kvwire.directories"


def open_directory(url: str) -> Directory:
    """Create the directory that a URL names, without connecting.

    Args:
        url: For example ``"redis://host:6379"``, ``"nats://host:4222"`` or
            ``"file:/run/fleet"``.

    Raises:
        UsageError: There is no such kind, or the URL cannot be used.
        BackendUnavailable: Its library is missing, or two distributions provide it.
    """
    scheme = url.partition(":")[0]
    try:
        cls = plug_in(GROUP, scheme, Directory)
    except PlugInError as exc:
        raise BackendUnavailable(f"directory {scheme!r}{exc}") from exc
    if cls is None:
        kinds = ", ".join(sorted({point.name for point in offered(GROUP)}))
        raise UsageError(f"unknown kind of directory {scheme!r}; choose one of {kinds}")
    directory: Directory = cls(url)
    return directory
