"""Who stands beside each tier of ``kvwire bench store``.

What is left of the same work without a store: a copy, a file, a transfer, a socket,
objects, redis. Nobody of those has hashes, an index, eviction, scattered blocks or, but
for the transfer, checksums; so the ratio is what that costs.
"""

from __future__ import annotations

from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.store import DISK, MEMORY, OBJECT, SERVER, StoreChoice
from kvwire.cli.bench.turns import Others
from tests.bench import redis
from tests.bench.store_pairs import BlockSocketsSide, TransferSide
from tests.bench.store_peers import CopySide, DictSide, FileSide, ObjectSide

NOTES = (
    "Of the others only a transfer has checksums, and blocks that lie scattered.",
    "file: pwrite and preadv of 16 MiB at once.",
    "redis: SET and GET in a row over loopback, a value for each block.",
)


def beside(choice: StoreChoice) -> Others:
    """Return everybody who is installed here."""
    of, place = Contender, choice.directory
    memcpy = of("memcpy", CopySide, alone=True)
    objects = of("obstore", ObjectSide, alone=True, place=place / "objects" / "bare")
    absent = redis.missing()
    servers = [of("sockets", BlockSocketsSide)]
    servers += [of("redis", redis.RedisSide, alone=True)] * (absent is None)
    movers: dict[str, list[Contender]] = {
        MEMORY: [memcpy],
        DISK: [memcpy, of("file", FileSide, alone=True, place=place)],
        OBJECT: [objects],
    }
    matchers = {MEMORY: [of("dict", DictSide, alone=True)]}
    pool_bytes = max(work.transfer.pool_bytes for work in choice.works)
    for transport in choice.transports:
        transfer = of(
            f"transfer {transport}",
            TransferSide,
            transport=transport,
            pool_bytes=pool_bytes,
            loop=choice.loop,
        )
        movers[f"{SERVER} over {transport}"] = [transfer, *servers]
        matchers[f"{SERVER} over {transport}"] = servers
    missing = [absent] if absent and SERVER in choice.tiers else []
    return Others(movers=movers, matchers=matchers, missing=missing, notes=NOTES)
