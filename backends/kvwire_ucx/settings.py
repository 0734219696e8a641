"""The settings of a UCX context: kvwire's defaults, the user's, the environment's.

A user writes ``backends = {ucx = {TLS = "rc,sm"}}``, with UCX's own names in capitals,
with or without their ``UCX_``. A variable ``UCX_...`` of the environment wins over both
that and the defaults here: that is where an operator looks. Nothing changes os.environ.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvwire.errors import UsageError

PREFIX: Final = "UCX_"
REQUIRE_RDMA: Final = "require_rdma"
ONE_SIDED: Final = "one_sided"
REGISTRATIONS: Final = "registrations"
_OWN: Final = (REQUIRE_RDMA, ONE_SIDED, REGISTRATIONS)
# Ranges of one lane that stay registered, each of which UCX keeps some 100 bytes for.
REGISTRATIONS_MAX: Final = 65536
_YES: Final = ("yes", "y", "true", "1", "on")
_NO: Final = ("no", "n", "false", "0", "off")

DEFAULTS: Final[Mapping[str, str]] = {
    # Without it UCX leaves shared memory out as soon as it has to notice dead peers.
    "MM_ERROR_HANDLING": "y",
    # Likewise for reading the peer's memory in one system call: 9.5 GB/s instead of 0.5
    # (1 MiB, same machine, same run). `lane` has what stands in for invalidation.
    "CMA_MEMORY_INVALIDATE": "y",
    # How long a dead process may stay unnoticed over shared memory and RDMA; UCX's own
    # 20 s are three times what kvwire allows a dead peer.
    "KEEPALIVE_INTERVAL": "2s",
    # Everything is a rendezvous but what kvwire_ucx.lane says itself: an eager message
    # of several pieces that has begun to arrive can neither be cancelled nor waited
    # for when its sender has died, so its memory would never be free.
    "RNDV_THRESH": "64",
    # UCX's 8 KiB a system call are half the rate of 64 KiB. These make another 1.6 of
    # it, in 0.67 instead of 0.82 s of CPU for a GiB, once nothing is paced (`sockets`):
    # each segment costs a wake-up of the peer and a turn of ours.
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "512K",
    # Fragments that UCX packs go through shared memory in segments, and each may wake
    # the peer: 31,000 times for a GiB with UCX's 8 KiB, 2,500 with these, which is half
    # of the CPU time. UCX counts their bytes in 16 bits, unchecked: 64 KiB damage every
    # payload. As many of them as fit into the memory that 512 of 8 KiB take.
    "MM_SEG_SIZE": "60K",
    "MM_RX_BUFS_GROW": "64",
}
# With one_sided: UCX's own cache of registrations would keep a range, and with it the
# key, for as long as the memory is mapped; ours knows when a payload is over.
DEFAULTS_OF_ONE_SIDED: Final[Mapping[str, str]] = {"RCACHE_ENABLE": "n"}
# For versions before this, as well.
OLD: Final = (1, 15)
DEFAULTS_OF_OLD: Final[Mapping[str, str]] = {
    # TCP of 1.13 ends the process ("comp->count > 0") when an endpoint fails while it
    # sends from the caller's memory. 1.15 and later do not.
    "ZCOPY_THRESH": "inf",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxSettings:
    """Holds the settings that a context is made with.

    Attributes:
        ucx: Values by UCX's names, without ``UCX_``.
        named: Those the user gave: a library that does not know one is an error.
        require_rdma: Without an RDMA device there is to be no lane.
        one_sided: Peers may read the memory of a payload while it is under way.
        registrations: Ranges of a lane that they may read afterwards as well, so that
            memory that is sent again need not be registered again.
    """

    ucx: Mapping[str, str]
    named: frozenset[str] = field(default_factory=frozenset)
    require_rdma: bool = False
    one_sided: bool = False
    registrations: int = 0


def parse(
    given: Mapping[str, str],
    version: tuple[int, ...],
    environment: Mapping[str, str] | None = None,
) -> UcxSettings:
    """Return the settings to make a context with."""
    environment = os.environ if environment is None else environment
    ucx = {**DEFAULTS, **(DEFAULTS_OF_OLD if version < OLD else {})}
    named = set()
    one_sided = _yes_or_no(ONE_SIDED, given.get(ONE_SIDED, "no"))
    if one_sided:
        ucx.update(DEFAULTS_OF_ONE_SIDED)
    for key, value in given.items():
        name = key.removeprefix(PREFIX)
        if key in _OWN:
            continue
        if name.isupper() and name.isascii():
            ucx[name] = value
            named.add(name)
        else:
            raise UsageError(
                f"backends.ucx: there is no setting {key!r}; there are "
                f"{', '.join(_OWN)}, and those of UCX in capitals, such as TLS"
            )
    ruled = {name for name in ucx if PREFIX + name in environment}
    return UcxSettings(
        ucx={name: value for name, value in ucx.items() if name not in ruled},
        named=frozenset(named - ruled),
        require_rdma=_yes_or_no(REQUIRE_RDMA, given.get(REQUIRE_RDMA, "no")),
        one_sided=one_sided,
        registrations=_count(REGISTRATIONS, given.get(REGISTRATIONS, "0")),
    )


def _yes_or_no(key: str, value: str) -> bool:
    if value.lower() in _YES:
        return True
    if value.lower() in _NO:
        return False
    raise UsageError(f'backends.ucx: {key}={value!r}; it is "yes" or "no"')


def _count(key: str, value: str) -> int:
    if value.isdecimal() and value.isascii() and len(value) < 9:
        count = int(value)
        if count <= REGISTRATIONS_MAX:
            return count
    raise UsageError(
        f"backends.ucx: {key}={value!r}; it is a number up to {REGISTRATIONS_MAX}"
    )
