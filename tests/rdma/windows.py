"""A window that its owner overwrites all the time, and a host that reads it by RDMA.

    python -m tests.rdma.windows own
    python -m tests.rdma.windows read --gets 10000

Each word of a block is the number under which it was offered last, and the owner sends
the number with the ticket. So a block that has landed shows bytes of another life, or
of two. `read` prints a line of JSON, and ends with status 1 if one did, or nothing was
read by `ucx`. With `--plant` the second look is left out, and such blocks are found.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Final

import numpy as np

import kvwire
from kvwire.aio import start_task
from tests.rdma.hosts import FIRST
from tests.rdma.mover import config

PORT: Final = 7401
TICKETS: Final = 7
NUMBER_BYTES: Final = 8
# A get finds its block overwritten about as often as not.
BLOCKS: Final = 8
WORDS: Final = 32 * 1024
AT_ONCE: Final = 4  # gets
PRINTED_GETS: Final = 500
PAUSE_S: Final = 0.01


async def own(options: argparse.Namespace) -> int:
    """Overwrite one block after the other, until the reader has gone."""
    words = np.zeros((BLOCKS, options.words), np.uint64)
    async with kvwire.open(config(options), name="owner") as comm:
        window = comm.expose("words", words, block_bytes=words[0].nbytes)
        await comm.listen(f"0.0.0.0:{PORT}")
        print("listening", flush=True)
        connection = await comm.accept()
        number = 0
        try:
            while True:
                number += 1
                block = number % BLOCKS
                window.withdraw([block])
                words[block] = number
                ticket = window.offer([block])
                await connection.send(
                    TICKETS, number.to_bytes(NUMBER_BYTES, "little") + ticket
                )
                await asyncio.sleep(random.uniform(0, PAUSE_S))
        except kvwire.ConnectionClosed:
            await window.close()
    print(f"{number} offers", flush=True)
    return 0


async def read(options: argparse.Namespace) -> int:
    """Get blocks by old and new tickets, and compare each word of what has landed."""
    found: Counter[str] = Counter(wrong=0, landed=0, missing=0)
    tickets: deque[tuple[int, bytes]] = deque(maxlen=BLOCKS)
    first = asyncio.Event()
    async with kvwire.open(config(options), name="reader") as comm:
        connection = await comm.connect(f"{options.at}:{PORT}")

        async def take_tickets() -> None:
            while True:
                said = bytes(await connection.recv(TICKETS))
                number = int.from_bytes(said[:NUMBER_BYTES], "little")
                tickets.append((number, said[NUMBER_BYTES:]))
                first.set()

        taking = start_task(take_tickets())
        remote = await connection.window("words")
        await first.wait()
        began = time.monotonic()
        gets = itertools.count(1)

        async def get() -> None:
            mine = np.zeros(options.words, np.uint64)
            # Some have to meet the owner, or nothing was tested.
            while next(gets) <= options.gets or not (
                found["missing"] or found["wrong"]
            ):
                number, ticket = random.choice(tickets)
                outcome = await remote.get(ticket, into=mine)
                found["landed" if outcome.complete else "missing"] += 1
                found["wrong"] += outcome.complete and bool((mine != number).any())
                found[f"by {remote.way}"] += 1
                if found[f"by {remote.way}"] % PRINTED_GETS == 0:
                    print(
                        f"{time.monotonic() - began:.0f} s: {dict(found)}", flush=True
                    )

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(get())
        taking.cancel()
        way = str(connection.transport_report)
    print("summary " + json.dumps({**found, "way": way}), flush=True)
    return 1 if found["wrong"] or not found["by ucx"] else 0


def main() -> int:
    """Be one of the two ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["own", "read"])
    parser.add_argument("--gets", type=int, default=300)
    parser.add_argument("--words", type=int, default=WORDS, help="of each block")
    parser.add_argument("--at", default=FIRST, help="the owner's address")
    parser.add_argument("--plant", action="store_true")
    parser.set_defaults(over="ucx", require=True, deadline=120.0)
    options = parser.parse_args()
    if options.plant:
        # Imports half of the tests, which takes a guest 10 s.
        from tests.programs.soak.windows import plant

        plant("ucx", Path())
    return asyncio.run((own if options.role == "own" else read)(options))


if __name__ == "__main__":
    sys.exit(main())
