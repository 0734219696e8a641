"""Libraries that do the work of ``kvwire bench fragments`` in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvwire import UsageError
from kvwire.cli.bench.fragments import MEMCPY, SAME_HOST, TCP, Join, Team
from tests.bench import iperf3
from tests.bench.peer import PEERS

ALL_PEERS: Final = (*PEERS, "iperf3")


def joining(names: Sequence[str], interpreters: Sequence[str]) -> Join:
    """Let each of these take part that is installed, whose memcpy always does.

    Args:
        names: Of :data:`ALL_PEERS`.
        interpreters: Where libraries are looked for.

    Raises:
        UsageError: A peer that nobody knows.
    """
    for name in names:
        if name not in (*ALL_PEERS, MEMCPY):
            raise UsageError(f"--peers {name}: there are {', '.join(ALL_PEERS)}")

    def join(team: Team, pool_bytes: int) -> None:
        for name in names:
            if name == "iperf3":
                if absent := iperf3.missing():
                    team.missing.append(absent)
                else:
                    team.by_wire[TCP].append(iperf3.contender())
            elif name in PEERS:
                peer = PEERS[name]
                found = peer.interpreter(interpreters)
                if found is None:
                    team.missing.append(peer.missing)
                for setting in peer.settings if found else ():
                    wire = SAME_HOST if setting == "shm" else TCP
                    one = peer.contender(setting, str(found), pool_bytes)
                    team.by_wire[wire].append(one)

    return join
