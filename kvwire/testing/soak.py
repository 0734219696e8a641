"""A soak: KV transfers under connection drops, every byte checked.

    python -m kvwire.testing.soak --gib 10 [--seed 0] [--drop-s 0.5] [--psk]
        [--transport tcp|local|ucx] [--processes]

Two communicators in one process move blocks, in both directions of asking, with prefill
in one piece and in chunks, aborts, partial commits and connections that are cut at
random moments. Each 64-byte line of the producer's blocks is stamped with (transfer,
layer, block, generation, line), so a byte that is misplaced, mixed or stale is told
apart from one that is missing. A block of the consumer is poisoned when its transfer
has drained, and the poison has to be there still when the block is used again: a late
write shows, whenever it comes. A producer that reports a whole transfer of which its
consumer has a part has made a *false report*.

With ``--processes`` the two sides are processes that are stopped, continued and killed
as well: :mod:`kvwire.testing.soak_processes`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import kvwire
from kvwire.limits import GIB
from kvwire.security.keys import write_key_file

LINE_BYTES = 64
POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
Words = npt.NDArray[np.uint64]

SPEC = kvwire.KVSpec(
    layers=8, kv_heads=8, head_dim=128, block_tokens=16, dtype="float16"
)
NUM_BLOCKS = 96
TRANSFERS_AT_ONCE = 4
BLOCKS_EACH_MAX = NUM_BLOCKS // TRANSFERS_AT_ONCE
# Chunks of one prefill.
CHUNKS_MAX = 3
# A round takes milliseconds, and a lease of 2 s where it is cut; longer is a hang.
ROUND_TIMEOUT_S = 60.0


class StampedCache:
    """A paged cache whose blocks are written and checked as stamps."""

    def __init__(self) -> None:
        shape = (
            NUM_BLOCKS,
            SPEC.components,
            SPEC.block_tokens,
            SPEC.kv_heads,
            SPEC.head_dim,
        )
        self._tensors = [np.zeros(shape, np.float16) for _ in range(SPEC.layers)]
        self.words: list[Words] = [
            t.reshape(NUM_BLOCKS, -1).view(np.uint64) for t in self._tensors
        ]
        for words in self.words:
            words[:] = POISON
        self.cache = kvwire.PagedCache(SPEC, self._tensors)
        self._lines = np.arange(
            self.words[0].shape[1] * 8 // LINE_BYTES, dtype=np.uint64
        ).repeat(LINE_BYTES // 8)

    def stamp(self, transfer: int, layer: int, position: int, generation: int) -> Words:
        """What a block holds: its transfer, layer, position, generation and line."""
        name = ((transfer * 64 + layer) * 256 + position) * 256 + generation % 256
        return (np.uint64(name) << np.uint64(16)) + self._lines

    def write(
        self,
        transfer: int,
        layer: int,
        blocks: list[int],
        generation: int,
        positions: range,
    ) -> None:
        """Stamp one layer of the blocks at some positions of a transfer's list."""
        for position in positions:
            block = blocks[position]
            self.words[layer][block] = self.stamp(transfer, layer, position, generation)

    def check(
        self, transfer: int, blocks: list[int], outcome: kvwire.Outcome, tally: Tally
    ) -> None:
        """Compare the blocks that have landed with their stamps."""
        landed = set(outcome.landed.ids().tolist())
        for position, block in enumerate(blocks):
            if block not in landed:
                continue
            for layer, words in enumerate(self.words):
                expected = self.stamp(transfer, layer, position, transfer)
                wrong = int(np.count_nonzero(words[block] != expected)) * 8
                tally.wrong_bytes += wrong
                tally.nbytes += expected.nbytes

    def poison(self, blocks: list[int]) -> None:
        """Mark blocks as free."""
        for words in self.words:
            words[blocks] = POISON

    def poisoned(self, blocks: list[int]) -> int:
        """Bytes of free blocks that somebody has written to."""
        return sum(
            int(np.count_nonzero(words[blocks] != POISON)) * 8 for words in self.words
        )


@dataclass
class Tally:
    """What a soak has seen."""

    nbytes: int = 0
    wrong_bytes: int = 0
    late_bytes: int = 0
    false_reports: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> bool:
        """Whether any byte was wrong or late, or a producer claimed too much."""
        return bool(self.wrong_bytes or self.late_bytes or self.false_reports)


class Soak:
    """Moves stamped blocks until enough bytes have landed."""

    def __init__(
        self,
        *,
        seed: int,
        goal_bytes: int,
        drop_s: float,
        psk_file: str = "",
        transport: str = "tcp",
    ) -> None:
        self.tally = Tally()
        self._psk_file = psk_file
        self._transport = transport
        self._random = random.Random(seed)  # noqa: S311 - a schedule, no secret
        self._goal_bytes = goal_bytes
        self._drop_s = drop_s
        self._producer = StampedCache()
        self._consumer = StampedCache()
        self._free_out = list(range(NUM_BLOCKS))
        self._free_in = list(range(NUM_BLOCKS))
        self._number = 0

    async def run(self, progress: Progress | None = None) -> Tally:
        """Run to the goal.

        Cancel safety: safe, connections are aborted.
        """
        task = None
        if progress is not None:
            task = progress.add_task("soak", total=self._goal_bytes)
        # A short lease: what a cut leaves behind must not hold up the next round.
        config = kvwire.Config(
            lease_s=2.0,
            trust="psk" if self._psk_file else "loopback",
            psk_file=self._psk_file,
        )
        async with (
            kvwire.open(config, name="soak-p") as p,
            kvwire.open(config, name="soak-c") as c,
        ):
            address = await p.listen("127.0.0.1:0")
            conn = await c.connect(address, transport=self._transport)
            dropper = asyncio.create_task(self._drop(p, c))
            try:
                while self.tally.nbytes < self._goal_bytes and not self.tally.failed:
                    conn = await self._connected(c, conn, address)
                    await self._round(p, c, conn)
                    if progress is not None and task is not None:
                        progress.update(task, completed=self.tally.nbytes)
            finally:
                dropper.cancel()
                await asyncio.gather(dropper, return_exceptions=True)
        return self.tally

    async def _round(
        self, p: kvwire.Communicator, c: kvwire.Communicator, conn: kvwire.Connection
    ) -> None:
        async with asyncio.timeout(ROUND_TIMEOUT_S), asyncio.TaskGroup() as group:
            for _ in range(TRANSFERS_AT_ONCE):
                group.create_task(self._transfer(p, c, conn))

    async def _transfer(
        self, p: kvwire.Communicator, c: kvwire.Communicator, conn: kvwire.Connection
    ) -> None:
        self._number += 1
        number, count = self._number, self._random.randint(1, BLOCKS_EACH_MAX)
        source = take_blocks(self._free_out, count, self._random)
        target = take_blocks(self._free_in, count, self._random)
        self.tally.late_bytes += self._consumer.poisoned(target)
        try:
            if self._random.random() < 0.5:
                out = p.publish(number, self._producer.cache, source)
                inc = conn.pull(number, self._consumer.cache, target)
            else:
                inc = c.expect(number, self._consumer.cache, target)
                back = next(
                    x for x in p.live_connections if x.peer.incarnation == c.incarnation
                )
                out = back.push(number, self._producer.cache, source)
        except (kvwire.ConnectionClosed, StopIteration):
            self.tally.counts["not begun: connection lost"] += 1
            for side in (p, c):
                side.exchange.end(number, "soak: not begun")
            self._free_out += source
            self._free_in += target
            return
        await self._produce(out, number, source)
        outcome = await inc
        claimed = await out
        self._check(number, target, outcome, claimed)
        await inc.drained()
        await out.drained()
        self._consumer.poison(target)
        self._free_out += source
        self._free_in += target

    async def _produce(
        self, out: kvwire.Outgoing, number: int, source: list[int]
    ) -> None:
        """Write and mark chunk by chunk and layer by layer.

        Now and then give up half-way, or leave the last layer of a chunk out.
        """
        fate = self._random.random()
        for positions in self._chunks(len(source)):
            for layer in range(SPEC.layers):
                self._producer.write(number, layer, source, number, positions)
                if fate < 0.05 and layer == SPEC.layers // 2:
                    out.abort("soak: aborted half-way")
                    return
                if fate < 0.1 and layer == SPEC.layers - 1:
                    out.finish(partial=True)
                    return
                blocks = slice(positions.start, positions.stop)
                out.ready(layers=layer, blocks=blocks)
                await asyncio.sleep(0)
        out.finish()

    def _chunks(self, count: int) -> list[range]:
        """The positions of a list, as a prefill may take them."""
        cuts = self._random.sample(
            range(1, count), min(count - 1, self._random.randrange(CHUNKS_MAX))
        )
        self.tally.counts["in several chunks"] += bool(cuts)
        edges = [0, *sorted(cuts), count]
        return [range(start, stop) for start, stop in pairwise(edges)]

    def _check(
        self,
        number: int,
        target: list[int],
        outcome: kvwire.Outcome,
        claimed: kvwire.Outcome,
    ) -> None:
        """Compare what landed with what was sent, and with what the producer says."""
        self.tally.false_reports += claimed.complete and not outcome.complete
        self.tally.counts["complete" if outcome.complete else "partial"] += 1
        self._consumer.check(number, target, outcome, self.tally)

    async def _drop(self, p: kvwire.Communicator, c: kvwire.Communicator) -> None:
        """Cut connections, at either end, at random moments."""
        while self._drop_s:
            await asyncio.sleep(self._random.expovariate(1 / self._drop_s))
            side = self._random.choice((p, c))
            for connection in side.live_connections:
                connection.abort("soak: cut")
                self.tally.counts["connections cut"] += 1

    async def _connected(
        self,
        c: kvwire.Communicator,
        conn: kvwire.Connection,
        address: kvwire.Address,
    ) -> kvwire.Connection:
        """A connection to work over; one that is being made may be cut too."""
        while conn.closed:
            await conn.wait_closed()
            try:
                conn = await c.connect(address, transport=self._transport)
            except (kvwire.ConnectionClosed, kvwire.BackendUnavailable):
                self.tally.counts["cut while connecting"] += 1
        return conn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if every byte was right.

    Args:
        arguments: Instead of ``sys.argv[1:]``.
    """
    parser = argparse.ArgumentParser(prog="python -m kvwire.testing.soak")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB to check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--drop-s", type=float, default=0.5, help="mean seconds between cuts; 0: none"
    )
    parser.add_argument(
        "--psk", action="store_true", help="prove a key and seal control frames"
    )
    parser.add_argument("--transport", choices=("tcp", "local", "ucx"), default="tcp")
    parser.add_argument(
        "--processes",
        action="store_true",
        help="two processes, which are stopped and killed too",
    )
    given = parser.parse_args(arguments)
    if given.processes and given.psk:
        parser.error("--psk is for one process; leave out --processes")
    with tempfile.TemporaryDirectory() as folder:
        psk_file = ""
        if given.psk:
            psk_file = str(Path(folder, "soak.key"))
            write_key_file(Path(psk_file))
        tally = _run(given, psk_file)
    return int(tally.failed)


def _run(given: argparse.Namespace, psk_file: str) -> Tally:
    console = Console()
    soak: Soak | ProcessSoak
    if given.processes:
        from kvwire.testing.soak_processes import ProcessSoak  # noqa: PLC0415 - a cycle

        soak = ProcessSoak(
            seed=given.seed,
            goal_bytes=int(given.gib * GIB),
            fault_s=given.drop_s,
            transport=given.transport,
        )
    else:
        soak = Soak(
            seed=given.seed,
            goal_bytes=int(given.gib * GIB),
            drop_s=given.drop_s,
            psk_file=psk_file,
            transport=given.transport,
        )
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tally = uvloop.run(soak.run(progress))
    seconds = time.monotonic() - began
    console.print(
        f"{tally.nbytes / GIB:.2f} GiB checked in {seconds:.1f} s, "
        f"{tally.wrong_bytes} wrong bytes, {tally.late_bytes} late bytes, "
        f"{tally.false_reports} false reports"
    )
    for what, count in sorted(tally.counts.items()):
        console.print(f"  {what}: {count}")
    if tally.failed:
        console.print(f"failed; again with --seed {given.seed}")
    return tally


def take_blocks(free: list[int], count: int, source: random.Random) -> list[int]:
    """Take some of the free blocks, whichever."""
    source.shuffle(free)
    taken, free[:] = free[:count], free[count:]
    return taken


if __name__ == "__main__":
    sys.exit(main())
