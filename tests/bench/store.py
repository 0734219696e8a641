"""Who stands beside each tier of ``kvwire bench store``.

What is left of the same work without a store: a copy, a file, a transfer, a socket,
objects, redis. Nobody of those has hashes, an index, eviction, scattered blocks or, but
for the transfer, checksums; so the ratio is what that costs.
"""

from __future__ import annotations

from kvwire.cli.bench.case import Contender, Others
from kvwire.cli.bench.pair import FragmentPair
from kvwire.cli.bench.solo import SoloContender
from kvwire.cli.bench.store import StoreChoice
from kvwire.cli.bench.store_work import DISK, MEMORY, OBJECT, SERVER
from tests.bench import redis
from tests.bench.sides import PROGRAM

NOTES = (
    "Of the others only a transfer has checksums, and blocks that lie scattered.",
    "file: pwrite and preadv of 16 MiB at once.",
    "redis: SET and GET in a row over loopback, a value for each block.",
)


def beside(choice: StoreChoice) -> Others:
    """Return everybody who is installed here."""
    place = choice.directory
    memcpy = _solo("memcpy")
    file = _solo("file", f"place={place}")
    sockets = FragmentPair("sockets", "store-sockets", program=PROGRAM)
    absent = redis.missing()
    servers: list[Contender] = [sockets]
    if absent is None:
        servers.append(redis.RedisContender())
    movers: dict[str, list[Contender]] = {
        MEMORY: [memcpy],
        DISK: [memcpy, file],
        OBJECT: [_solo("obstore", f"place={place / 'objects' / 'bare'}")],
    }
    matchers: dict[str, list[Contender]] = {MEMORY: [_solo("dict")]}
    for transport in choice.transports:
        name = f"{SERVER} over {transport}"
        movers[name] = [_transfer(choice, transport), *servers]
        matchers[name] = servers
    missing = [absent] if absent and SERVER in choice.tiers else []
    return Others(movers=movers, matchers=matchers, missing=missing, notes=NOTES)


def _solo(name: str, *options: str) -> SoloContender:
    return SoloContender(name, f"store-{name}", options, PROGRAM)


def _transfer(choice: StoreChoice, transport: str) -> Contender:
    pool_bytes = max(work.transfer.pool_bytes for work in choice.works)
    options = [f"transport={transport}", f"pool_bytes={pool_bytes}"]
    options.append(f"loop={choice.loop}")
    return FragmentPair(
        f"transfer {transport}", "store-transfer", options, program=PROGRAM
    )
