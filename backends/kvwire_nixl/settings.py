"""The settings of NIXL lanes: the plug-in that moves the bytes, and its parameters.

A user writes ``backends = {nixl = {plugin = "UCX", "param.num_workers" = "2"}}``. An
unknown name is an error here, since NIXL itself ignores parameters that it does not
have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvwire.errors import UsageError, nearest
from kvwire.types import OneSidedWindows

PLUGIN: Final = "plugin"
EXPOSE: Final = "expose"
PARAM: Final = "param."
CACHES: Final = "caches"
STAGING: Final = "staging"

_UCX: Final = "UCX"
_ENGINE: Final = "engine_config"
# UCX settings for the plug-in named UCX; the user's settings follow them and take
# precedence.
_UCX_DEFAULTS: Final = ",".join(
    (
        # With UCX's default a dead peer is detected only after 20 s; kvwire allows a
        # third of that.
        "KEEPALIVE_INTERVAL=2s",
        # UCX answers a read over TCP in messages of this size. With its default of 8
        # KiB, this takes 1.3 s of CPU per GiB on both sides together; with 256 KiB, it
        # takes 0.7 s, as much as a write.
        "TCP_TX_SEG_SIZE=256K",
        "TCP_RX_SEG_SIZE=512K",
    )
)
# Parameters that the UCX plug-in accepts but does not list.
_UCX_UNLISTED: Final = frozenset(
    {_ENGINE, "num_threads", "device_list", "split_batch_size"}
)
# These plug-ins move data to files, objects and disks, not to another process.
_STORAGE: Final = frozenset(
    {"POSIX", "GDS", "GDS_MT", "OBJ", "AZURE_BLOB", "GUSLI", "HF3FS", "INFINIA"}
)


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """The settings of an agent."""

    plugin: str
    params: Mapping[str, str]
    exposes_caches: bool

    def require_known(self, listed: Mapping[str, str]) -> None:
        """Refuse a parameter that the plug-in does not have.

        Raises:
            UsageError: There is such a parameter; the text has the nearest name.
        """
        known = {*listed, *(_UCX_UNLISTED if self.plugin == _UCX else ())}
        for name in self.params:
            if listed and name not in known:
                raise UsageError(
                    f"backends.nixl: plug-in {self.plugin} has no parameter {name!r}; "
                    f"{nearest(name, known)}"
                )


def parse(given: Mapping[str, str], windows: OneSidedWindows = "user") -> NixlSettings:
    """Parse a user's settings; add defaults for the others.

    Args:
        given: The settings.
        windows: The setting ``one_sided_windows``. With "off" no peer may read an array
            in place, so every payload is copied to a slot.

    Raises:
        UsageError: A name or a value is unknown.
    """
    params = {
        name.removeprefix(PARAM): value
        for name, value in given.items()
        if name.startswith(PARAM)
    }
    for name in given:
        if not name.startswith(PARAM) and name not in (PLUGIN, EXPOSE):
            raise UsageError(
                f"backends.nixl: unknown setting {name!r}; "
                f"{nearest(name, (PLUGIN, EXPOSE))}; write the plug-in's own "
                f'parameters as "{PARAM}NAME"'
            )
    plugin = given.get(PLUGIN, _UCX)
    if plugin in _STORAGE:
        raise UsageError(
            f"backends.nixl: plug-in {plugin} moves data to storage; a lane needs one "
            "that reaches another process, such as UCX, LIBFABRIC or Mooncake"
        )
    expose = given.get(EXPOSE, CACHES)
    if expose not in (CACHES, STAGING):
        raise UsageError(
            f"backends.nixl: {EXPOSE}={expose!r}; {nearest(expose, (CACHES, STAGING))}"
        )
    if plugin == _UCX:
        own = params.get(_ENGINE)
        params[_ENGINE] = f"{_UCX_DEFAULTS},{own}" if own else _UCX_DEFAULTS
    return NixlSettings(plugin, params, expose == CACHES and windows != "off")
