"""The settings of a UCX context: kvwire's defaults, the user's, the environment's.

A user writes ``backends = {ucx = {TLS = "rc,sm"}}``, with UCX's own names in capitals,
with or without the prefix ``UCX_``. An environment variable ``UCX_...`` overrides both
the settings and the defaults, because operators look there. os.environ is never
changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvwire.errors import UsageError

PREFIX: Final = "UCX_"
REQUIRE_RDMA: Final = "require_rdma"
# Settings of former versions, which have been removed.
_GONE: Final = ("one_sided", "registrations")
_YES: Final = ("yes", "y", "true", "1", "on")
_NO: Final = ("no", "n", "false", "0", "off")

DEFAULTS: Final[Mapping[str, str]] = {
    # Without it, UCX excludes shared memory when it has to detect dead peers.
    "MM_ERROR_HANDLING": "y",
    # The same for reading the peer's memory in one system call: 9.5 GB/s instead of 0.5
    # (1 MiB, same machine, same run). `lane` describes the substitute for invalidation.
    "CMA_MEMORY_INVALIDATE": "y",
    # With UCX's default the thread that creates an endpoint waits in connect(): for two
    # minutes if the peer's network does not answer, and our event loop with it.
    "TCP_CONN_NB": "y",
    # How long a dead process may stay undetected over shared memory and RDMA; UCX's
    # default of 20 s is three times the time that kvwire allows.
    "KEEPALIVE_INTERVAL": "2s",
    # Every message is a rendezvous, except the messages of kvwire_ucx.lane itself. An
    # eager message of several pieces that has begun to arrive can be neither cancelled,
    # nor completed once its sender has died, so its memory would never be free.
    "RNDV_THRESH": "64",
    # UCX's default of 8 KiB per system call reaches half the rate of 64 KiB. 256 KiB is
    # another 1.6 times as fast, with 0.67 instead of 0.82 s of CPU per GiB, once pacing
    # is off (`sockets`): each segment costs a wake-up of the peer and a turn of our
    # loop.
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "512K",
    # Fragments that UCX packs are sent through shared memory in segments, and each
    # segment may wake the peer: 31,000 times per GiB with UCX's default of 8 KiB, 2,500
    # times with 60 KiB, which saves half of the CPU time. UCX counts a segment's bytes
    # in 16 bits without a check: 64 KiB would damage every payload. The number of
    # segments that fit into the memory of 512 segments of 8 KiB.
    "MM_SEG_SIZE": "60K",
    "MM_RX_BUFS_GROW": "64",
}
# UCX's own cache of registrations keeps ranges as long as the memory is mapped, some of
# them merged into larger ones, and so it keeps their keys. The key of a window has to
# end with the window. If no peer may read memory in place, the key with which a peer
# fetches a payload has to end with the payload.
DEFAULTS_OF_ENDING_KEYS: Final[Mapping[str, str]] = {"RCACHE_ENABLE": "n"}
# Earlier versions get further defaults.
OLD: Final = (1, 15)
DEFAULTS_OF_OLD: Final[Mapping[str, str]] = {
    # UCX 1.13 aborts the process ("comp->count > 0") if a TCP endpoint fails while it
    # sends from the caller's memory. Versions from 1.15 on do not.
    "ZCOPY_THRESH": "inf",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxSettings:
    """The settings of a context.

    Attributes:
        ucx: Values by UCX's names, without ``UCX_``.
        named: The names that the user gave; if a library does not know one, that is an
            error.
        require_rdma: Whether a lane needs an RDMA device.
    """

    ucx: Mapping[str, str]
    named: frozenset[str] = field(default_factory=frozenset)
    require_rdma: bool = False


def parse(
    given: Mapping[str, str],
    version: tuple[int, ...],
    environment: Mapping[str, str] | None = None,
    *,
    keys_end: bool = False,
) -> UcxSettings:
    """Return the settings for a context.

    Args:
        given: The user's settings.
        version: The version of UCX.
        environment: Variables that override the settings; None for the process's
            environment.
        keys_end: Whether a key ends with the window or payload that it was made for.

    Raises:
        UsageError: The user gave an unknown name, or a wrong value.
    """
    environment = os.environ if environment is None else environment
    ucx = {**DEFAULTS, **(DEFAULTS_OF_OLD if version < OLD else {})}
    named = set()
    if keys_end:
        ucx.update(DEFAULTS_OF_ENDING_KEYS)
    for key, value in given.items():
        name = key.removeprefix(PREFIX)
        if key == REQUIRE_RDMA:
            continue
        if key in _GONE:
            raise UsageError(
                f"backends.ucx: setting {key!r} was removed; for peers that read "
                'finished blocks use windows, with one_sided_windows="peers"'
            )
        if name.isupper() and name.isascii():
            ucx[name] = value
            named.add(name)
        else:
            raise UsageError(
                f"backends.ucx: unknown setting {key!r}; use {REQUIRE_RDMA}, or one "
                "of UCX's own in capitals, such as TLS"
            )
    ruled = {name for name in ucx if PREFIX + name in environment}
    return UcxSettings(
        ucx={name: value for name, value in ucx.items() if name not in ruled},
        named=frozenset(named - ruled),
        require_rdma=_yes_or_no(REQUIRE_RDMA, given.get(REQUIRE_RDMA, "no")),
    )


def _yes_or_no(key: str, value: str) -> bool:
    if value.lower() in _YES:
        return True
    if value.lower() in _NO:
        return False
    raise UsageError(f'backends.ucx: {key}={value!r}; use "yes" or "no"')
