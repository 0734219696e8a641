"""One side of a contender of :mod:`tests.bench`: those of kvwire, and these."""

from __future__ import annotations

import sys
from typing import Final

from kvwire.cli.bench.sides.__main__ import HALVES, Roles, main
from tests.bench.cost_half import CostHalf
from tests.bench.redis_solo import RedisSolo
from tests.bench.store_halves import BlockSocketsHalf, TransferHalf
from tests.bench.store_peers import CopySolo, DictSolo, FileSolo, ObjectSolo

PROGRAM: Final = (sys.executable, "-m", "tests.bench.sides")
ROLES: Final[Roles] = {
    **HALVES,
    "cost": lambda options: CostHalf(options["transport"], int(options["pool_bytes"])),
    "store-dict": lambda _: DictSolo(),
    "store-file": lambda options: FileSolo(options["place"]),
    "store-memcpy": lambda _: CopySolo(),
    "store-obstore": lambda options: ObjectSolo(options["place"]),
    "store-redis": lambda options: RedisSolo(int(options["port"])),
    "store-sockets": lambda _: BlockSocketsHalf(),
    "store-transfer": lambda options: TransferHalf(
        options["transport"], int(options["pool_bytes"])
    ),
}


if __name__ == "__main__":
    main(sys.argv[1:], ROLES)
