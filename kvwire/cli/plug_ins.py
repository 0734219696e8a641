"""Subcommands of other distributions, by the entry-point group ``kvwire.commands``.

Each has the name of a command and ``module:app``, a cyclopts ``App`` of that name. Its
module is imported when the command is called, not for ``kvwire --help``, which shows
the summary of its distribution. So does its own ``--help`` if the app has no help.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Final

from cyclopts import App

import kvwire
from kvwire.extras import NotInstalledError

GROUP: Final = "kvwire.commands"
# The commands of the packages in kvwire's repository: each with its package, and its
# line in ``kvwire --help``.
_PACKAGES: Final = {
    "bench": ("certify", "Measure transports on this machine, or between two hosts."),
    "certify": (
        "certify",
        "Cancel, time out, kill and reconnect a transport, and check every byte.",
    ),
    "session": ("engines", "Keep the sessions of a llama-server in a store."),
    "store": (
        "store",
        "Serve a KV store to other processes, or inspect and manage one.",
    ),
}


class Commands:
    """The subcommands and options that installed distributions add to a command.

    Args:
        app: The command, which has its own subcommands.
        points: The entry points of the others.
    """

    def __init__(self, app: App, points: Iterable[EntryPoint]) -> None:
        self._app = app
        self._own = frozenset(app)
        found: dict[str, dict[str, EntryPoint]] = defaultdict(dict)
        for point in points:
            found[point.name][point.value] = point
        self._claims = {name: tuple(claims.values()) for name, claims in found.items()}
        for name, (point, *_) in self._claims.items():
            if name not in self._own:
                app.command(point.value, name=name, help=_summary(point))

    def load(self, name: str) -> None:
        """Import the modules of a subcommand; nothing for one of kvwire's own.

        Raises:
            UsageError: Several distributions have that name.
            NotInstalledError: Its package is missing, or cannot be imported.
        """
        claims = self._claims.get(name, ())
        if not claims:
            if name in _PACKAGES:
                package, _ = _PACKAGES[name]
                raise NotInstalledError(
                    f"the command {name!r} needs kvwire-{package}, which is not "
                    f"installed: pip install ./packages/{package} in a clone of kvwire"
                )
            return
        if len(claims) > 1 or name in self._own:
            owners = sorted(map(_owner, claims)) + ["kvwire"] * (name in self._own)
            raise kvwire.UsageError(
                f"the command {name!r} is claimed by {' and '.join(owners)}; "
                "uninstall one of them"
            )
        try:
            own = claims[0].load().help
            self._app[name].help = own or _summary(claims[0])
        # A plug-in may raise anything while it is imported.
        except Exception as exc:
            owner = _owner(claims[0])
            raise NotInstalledError(
                f"the command {name!r} of {owner} cannot be imported: "
                f"{type(exc).__name__}: {exc}; install {owner} again, in version "
                f"{kvwire.__version__} of kvwire, or uninstall it"
            ) from exc


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


def _summary(point: EntryPoint) -> str:
    package, line = _PACKAGES.get(point.name, ("", ""))
    if line and _owner(point) == f"kvwire-{package}":
        return line
    summary = point.dist.metadata["Summary"] if point.dist else ""
    return f"{summary}."
