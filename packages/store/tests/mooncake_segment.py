"""A process that gives a Mooncake Store some memory, until its input ends."""

from __future__ import annotations

import sys

from mooncake.store import MooncakeDistributedStore


def main(master: str, nbytes: int) -> None:
    store = MooncakeDistributedStore()
    joined = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", nbytes, 16 << 20, "tcp", "", master
    )
    if joined:
        raise SystemExit(f"error {joined}")
    print("joined", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
