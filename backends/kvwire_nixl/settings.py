"""The settings of NIXL lanes: which plug-in moves the bytes, and what it is told.

A user writes ``backends = {nixl = {plugin = "UCX", "param.num_workers" = "2"}}``. A
name that nobody knows is an error: NIXL itself ignores parameters that it has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvwire.errors import UsageError, nearest

PLUGIN: Final = "plugin"
EXPOSE: Final = "expose"
PARAM: Final = "param."
CACHES: Final = "caches"
STAGING: Final = "staging"

_UCX: Final = "UCX"
_ENGINE: Final = "engine_config"
# What the plug-in of that name tells UCX; what a user gives comes behind it, and wins.
_UCX_DEFAULTS: Final = ",".join(
    (
        # UCX's own leaves a dead peer unnoticed for 20 s; kvwire allows a third.
        "KEEPALIVE_INTERVAL=2s",
        # UCX serves a read over TCP in messages of this size. Its own 8 KiB take 1.3 s
        # of CPU for a GiB, of both sides; these take 0.7, as a write does.
        "TCP_TX_SEG_SIZE=256K",
        "TCP_RX_SEG_SIZE=512K",
    )
)
# What the UCX plug-in takes beside what it lists.
_UCX_UNLISTED: Final = frozenset(
    {_ENGINE, "num_threads", "device_list", "split_batch_size"}
)
# They move to files, objects and disks, and know no other process.
_STORAGE: Final = frozenset(
    {"POSIX", "GDS", "GDS_MT", "OBJ", "AZURE_BLOB", "GUSLI", "HF3FS", "INFINIA"}
)


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """Holds what an agent is made with."""

    plugin: str
    params: Mapping[str, str]
    exposes_caches: bool

    def require_known(self, listed: Mapping[str, str]) -> None:
        """Refuse a parameter that the plug-in does not have."""
        known = {*listed, *(_UCX_UNLISTED if self.plugin == _UCX else ())}
        for name in self.params:
            if listed and name not in known:
                raise UsageError(
                    f"backends.nixl: plug-in {self.plugin} has no parameter {name!r}; "
                    f"{nearest(name, known)}"
                )


def parse(given: Mapping[str, str]) -> NixlSettings:
    """Return the settings that a user gave, with defaults for the rest."""
    params = {
        name.removeprefix(PARAM): value
        for name, value in given.items()
        if name.startswith(PARAM)
    }
    for name in given:
        if not name.startswith(PARAM) and name not in (PLUGIN, EXPOSE):
            raise UsageError(
                f"backends.nixl: there is no setting {name!r}; "
                f"{nearest(name, (PLUGIN, EXPOSE))}, and the plug-in's own parameters "
                f'as "{PARAM}NAME"'
            )
    plugin = given.get(PLUGIN, _UCX)
    if plugin in _STORAGE:
        raise UsageError(
            f"backends.nixl: plug-in {plugin} moves data to storage; a lane goes to "
            f"another process, as with UCX, LIBFABRIC or Mooncake"
        )
    expose = given.get(EXPOSE, CACHES)
    if expose not in (CACHES, STAGING):
        raise UsageError(
            f"backends.nixl: {EXPOSE}={expose!r}; {nearest(expose, (CACHES, STAGING))}"
        )
    if plugin == _UCX:
        own = params.get(_ENGINE)
        params[_ENGINE] = f"{_UCX_DEFAULTS},{own}" if own else _UCX_DEFAULTS
    return NixlSettings(plugin, params, expose == CACHES)
