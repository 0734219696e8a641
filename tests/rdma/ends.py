"""A transport of others between two hosts, by certify's adapter: what memory holds.

    python -m tests.rdma.ends own nixl
    python -m tests.rdma.ends read nixl cancel

The reader gets 64 MiB of the owner's memory once. `stale`: after the owner has
withdrawn and overwritten it. `withdraw`: the owner does that in the middle. `cancel`:
the reader gives up in the middle, and uses its memory for something else. A line of
JSON has the end of the get, and how many words of the reader's memory hold what: the
owner's first or later content, or the reader's own.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire_certify.transport import load
from tests.rdma.hosts import FIRST

PORT: Final = 7402
WORDS: Final = 8 << 20
FIRST_WORD: Final = 0x1111
LATER_WORD: Final = 0x2222
OWN_WORD: Final = 0x3333
MIDDLE_S: Final = 0.3
# How long bytes may still arrive that nobody waits for.
WATCH_S: Final = 15.0
LINE: Final = b"withdraw\n"


def _bytes(words: npt.NDArray[np.uint64]) -> memoryview:
    return words.data.cast("B")


async def own(options: argparse.Namespace) -> None:
    """Offer memory, and withdraw it when the reader says so, until it has gone."""
    words = np.full(WORDS, FIRST_WORD, np.uint64)
    end = load(options.target)
    parts = [
        await end.open(_bytes(np.zeros(1 << 10, np.uint64))),
        await end.offer(_bytes(words)),
    ]
    gone = asyncio.Event()

    async def serve(asks: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        for part in parts:
            answers.write(len(part).to_bytes(4, "little") + part)
        while await asks.readline():
            await end.withdraw(parts[1])
            words[:] = LATER_WORD
            answers.write(LINE)
        answers.close()
        gone.set()

    async with await asyncio.start_server(serve, "0.0.0.0", PORT):
        print("listening", flush=True)
        await gone.wait()


async def read(options: argparse.Namespace) -> None:
    """Get it once, and print what the memory holds afterwards."""
    words = np.full(WORDS, OWN_WORD, np.uint64)
    end = load(options.target)
    await end.open(_bytes(words))
    answers, asks = await asyncio.open_connection(options.at, PORT)
    parts = []
    for _ in range(2):
        length = int.from_bytes(await answers.readexactly(4), "little")
        parts.append(await answers.readexactly(length))
    await end.connect(parts[0])

    async def withdraw() -> None:
        asks.write(LINE)
        await answers.readexactly(len(LINE))

    if options.case == "stale":
        await withdraw()
    getting = asyncio.create_task(end.get(parts[1], _bytes(words), None))
    if options.case != "stale":
        await asyncio.wait([getting], timeout=MIDDLE_S)
    moved = int((words == FIRST_WORD).sum())
    if options.case == "withdraw":
        await withdraw()
    elif options.case == "cancel":
        getting.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            await asyncio.wait([getting])
    if options.case == "cancel":
        words[:] = OWN_WORD
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                await asyncio.Event().wait()  # nothing may happen meanwhile
    kinds = {"first": FIRST_WORD, "later": LATER_WORD, "own": OWN_WORD}
    held = {name: int((words == word).sum()) for name, word in kinds.items()}
    print("summary " + json.dumps({"get": _ended(getting), "moved": moved, **held}))
    sys.stdout.flush()
    asks.close()


def _ended(getting: asyncio.Task[bool | bytes]) -> str:
    if not getting.done():
        return "hangs"
    if getting.cancelled():
        return "cancelled"
    error = getting.exception()
    return repr(error) if error is not None else f"landed: {getting.result()!r}"


def main() -> int:
    """Be one of the two ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["own", "read"])
    parser.add_argument("target", choices=["nixl", "ucx"])
    cases = ["stale", "withdraw", "cancel"]
    parser.add_argument("case", nargs="?", choices=cases)
    parser.add_argument("--at", default=FIRST, help="the owner's address")
    options = parser.parse_args()
    asyncio.run((own if options.role == "own" else read)(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
