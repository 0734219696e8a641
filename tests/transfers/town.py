"""Three processes that share names of KV transfers, in virtual time.

The first one listens and the others dial it. Each has a cache whose blocks are owned by
one transfer at a time, as an engine's pool has it: a block that is not owned holds
FREE, a block of a producer holds UNWRITTEN until it is marked ready, and what is marked
holds a number that names the transfer, the layer and the position. So a byte that was
read too early or too late, that is another transfer's, or that was written to memory
with a new owner is seen in the arrays.

What it reads of the library's inside is in :mod:`tests.transfers.town_inside`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest

import kvwire
from kvwire.errors import ProtocolError
from kvwire.kv.outcome import timings_of
from kvwire.transfers import registry as registry_module
from kvwire.transfers import timings
from kvwire.transfers.transfer import NO_MEMORY_S
from tests.support import inside, virtual_time
from tests.transfers.town_inside import TOMBSTONES, Inside, JobsOf

LAYERS: Final = 3
BLOCKS: Final = 40
COUNT: Final = 3
SPEC: Final = kvwire.KVSpec(
    layers=LAYERS, kv_heads=2, head_dim=16, block_tokens=8, dtype="float32"
)
# Two are shared by peers of any kind; what moves under the third is encoded.
NAMES: Final = ("a", "b", "coded")
LEASE_S: Final = 2.0
CONFIG: Final[dict[str, Any]] = {
    "lease_s": LEASE_S,
    "chunk_bytes": 65_536,
    "ping_interval_s": 0.5,
    "restart_grace_s": 1.0,
    "close_timeout_s": 2.0,
    # What arrives is taken as it is: then memory that was lent for too short shows.
    "checksum": "off",
}
FREE, UNWRITTEN = -1.0, -2.0
# Long enough for a leg to go on, on a link that nothing disturbs.
SOON_S: Final = 1.2
# Everything that was begun has its end within this time once nothing goes wrong.
LIVENESS_S: Final = 60.0
_TOWNS = itertools.count()

Part = tuple[int, int]
"""A layer, and a position of the block list."""


@dataclass(eq=False)
class End:
    """One end of a transfer, and what the town knows of it.

    Attributes:
        serial: Of a producer: names the transfer in the bytes it moves. Of a consumer:
            that of the producer whose bytes have come.
        unmarked: Parts that the producer may still mark.
        unnamed: Blocks that a growing transfer will name.
        behind: What marks wait for, and the parts behind each.
        landed: The parts that the outcome names, once there is one.
        begun, ended: How often an observer was told.
    """

    node: Node
    verb: str
    name: str
    end: Any
    blocks: list[int]
    serial: int = 0
    consumers: int = 1
    unmarked: set[Part] = field(default_factory=set)
    unnamed: list[int] = field(default_factory=list)
    unnamed_for_good: list[int] = field(default_factory=list)
    behind: list[tuple[asyncio.Future[None], set[Part]]] = field(default_factory=list)
    outcome: kvwire.Outcome | None = None
    landed: set[Part] = field(default_factory=set)
    finished: bool = False
    recycled: bool = False
    follower: asyncio.Task[None] | None = None
    communicator: Any = None
    jobs: JobsOf | None = None

    @property
    def asks(self) -> bool:
        return self.verb in ("pull", "push")

    @property
    def produces(self) -> bool:
        return self.verb in ("publish", "push")

    def __repr__(self) -> str:
        return f"{self.verb} {self.name!r} #{self.serial} of {self.node.name}"


class Node:
    """A process: its cache outlives its communicators, each a start of the process."""

    def __init__(self, town: Town, index: int) -> None:
        self.town, self.index = town, index
        self.name = "pqr"[index]
        shape = (BLOCKS, 2, SPEC.block_tokens, SPEC.kv_heads, SPEC.head_dim)
        self.tensors = [np.full(shape, FREE, np.float32) for _ in range(LAYERS)]
        self.cache = kvwire.PagedCache(SPEC, self.tensors)
        self.free = list(range(BLOCKS))
        self.ends: list[End] = []
        self.communicator: Any = None

    async def start(self) -> None:
        self.communicator = kvwire.Communicator(kvwire.Config(name=self.name, **CONFIG))
        self.communicator.watchers.add(self)
        Inside.replace_threads(self.communicator)
        if self.index == 0:
            await self.communicator.listen(self.town.address)

    # --- as an observer of transfers --------------------------------------------------

    def begun(self, transfer: Any) -> None:
        self.town.begun[transfer] += 1

    def ended(self, transfer: Any, outcome: kvwire.Outcome, ran_on: object) -> None:
        assert self.town.begun[transfer] == 1, "ended, and never begun"
        self.town.ended[transfer] += 1
        assert self.town.ended[transfer] == 1, "ended twice"

    # --- memory -----------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def fill(self, blocks: Iterable[int], value: float) -> None:
        for tensor in self.tensors:
            tensor[list(blocks)] = value

    def number_in(self, layer: int, block: int) -> int:
        """The one number that a layer of a block holds; -9 if it holds several."""
        held = self.tensors[layer][block]
        first = round(float(held.flat[0]))
        return first if (np.abs(held - first) < 0.5).all() else -9


class Town:
    """All processes, the connections between them, and what is under way.

    Use it as a context: at its end everything has to come to its end.
    """

    def __init__(self) -> None:
        self.address = f"inproc://town-{next(_TOWNS)}"
        self.begun: Counter[Any] = Counter()
        self.ended: Counter[Any] = Counter()
        self.producers: dict[int, End] = {}
        self.troubles: list[str] = []
        self.shortages = 0
        # What lets a link go on again, by its connection.
        self._stopped: dict[Any, Callable[[], None]] = {}
        # What lets a link close whose transport takes its time.
        self._closing: list[tuple[Any, Callable[[], None]]] = []
        self._disturbed_at = 0.0
        self._restarting = False
        self._runner = asyncio.Runner(loop_factory=virtual_time.VirtualTimeLoop)
        self.loop: Any = self._runner.get_loop()
        self.loop.set_exception_handler(
            lambda _, context: self.troubles.append(f"{context}")
        )
        self._undo = self._watched()
        self._undo.__enter__()
        self.nodes = [Node(self, index) for index in range(3)]
        self.run(self._begin())

    async def _begin(self) -> None:
        for node in self.nodes:
            await node.start()
        for node in self.nodes[1:]:
            await node.communicator.connect(self.address)
        await virtual_time.pass_time(0.01)

    def run(self, coroutine: Any) -> Any:
        return self._runner.run(coroutine)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Note errors that are only logged; let memory be short; make tables small."""
        town, real = self, timings_of

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                # Every peer here keeps the rules.
                broken = any(
                    isinstance(one, ProtocolError) for one in record.args or ()
                )
                if not broken and record.levelno < logging.ERROR:
                    return
                if "memory for its outcome" not in record.getMessage():
                    cause = record.exc_info and record.exc_info[1]
                    town.troubles.append(f"{record.getMessage()}: {cause!r}")

        def made(**spent: float) -> Any:
            if town.shortages:
                town.shortages -= 1
                town._disturb()
                raise MemoryError
            return real(**spent)

        listener, logger = Listener(logging.WARNING), logging.getLogger("kvwire")
        logger.addHandler(listener)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timings, "timings_of", made)
            patch.setattr(registry_module, "TOMBSTONES_MAX", TOMBSTONES)
            yield
        logger.removeHandler(listener)

    # --- time -------------------------------------------------------------------------

    def turns(self, count: int) -> None:
        async def some() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.run(some())

    def rest(self, seconds: float) -> None:
        self.run(virtual_time.pass_time(seconds))

    # --- transfers --------------------------------------------------------------------

    @property
    def ends(self) -> list[End]:
        return [end for node in self.nodes for end in node.ends]

    @property
    def open(self) -> list[End]:
        return [end for end in self.ends if not end.end.done()]

    def begin(
        self, node: Node, verb: str, name: str, by: Any, options: dict[str, Any]
    ) -> End | None:
        """Call a verb of a communicator, connection or peer; None without memory."""
        growing = options.get("growing", False)
        blocks = node.take(COUNT)
        if len(blocks) < COUNT:
            node.free += blocks
            return None
        end = End(node, verb, name, None, blocks, communicator=node.communicator)
        end.consumers = options.get("consumers", 1)
        if end.produces:
            end.serial = len(self.producers) + 1
            node.fill(blocks, UNWRITTEN)
            if growing:
                end.unnamed = blocks[1:]
                options["tokens"] = COUNT * SPEC.block_tokens
            named = COUNT - len(end.unnamed)
            end.unmarked = set(itertools.product(range(LAYERS), range(named)))
        if name == "coded":
            options["codec"] = "int8"
        taken = any(
            one.name == name and one.verb == verb and not one.end.done()
            for one in node.ends
        )
        must_fail = taken and verb in ("publish", "expect")
        first = blocks[: COUNT - len(end.unnamed)]

        async def call() -> None:
            end.end = getattr(by, verb)(name, node.cache, first, **options)
            Inside.own_jobs(end)
            end.follower = asyncio.ensure_future(self._follow(end))

        if must_fail:
            with pytest.raises(kvwire.UsageError, match="already"):
                self.run(call())
            node.fill(blocks, FREE)
            node.free += blocks
            return None
        self.run(call())
        if end.produces:
            self.producers[end.serial] = end
        node.ends.append(end)
        return end

    async def _follow(self, end: End) -> None:
        outcome = await end.end
        assert end.outcome is None, "an outcome comes once"
        end.outcome = outcome
        end.landed = self._parts(end, outcome)
        if not end.produces:
            self._check_bytes(end, end.landed)
        assert outcome.complete == (len(end.landed) == LAYERS * COUNT)
        self._check_lease(end, outcome)
        await end.end.drained()
        self._recycle(end)

    def _parts(self, end: End, outcome: kvwire.Outcome) -> set[Part]:
        missing = outcome.missing
        found: set[Part] = set()
        for position, block in enumerate(end.blocks):
            if block in end.unnamed or block in end.unnamed_for_good:
                continue
            lost = missing.layers(("kv", block)) if ("kv", block) in missing else ()
            found |= {(one, position) for one in range(LAYERS) if one not in lost}
            if lost:
                assert missing["kv", block], "no reason for what is missing"
        return found

    def _check_bytes(self, end: End, parts: set[Part]) -> None:
        """Parts that a consumer may read hold what one producer has marked there."""
        for layer, position in parts:
            number = end.node.number_in(layer, end.blocks[position])
            serial, rest = divmod(number, 64)
            assert number > 0, f"{end}: reads {number} at {layer, position}"
            assert rest == layer * 16 + position, f"{end}: {rest} at {layer, position}"
            end.serial = end.serial or serial
            assert serial == end.serial, f"{end}: has bytes of {serial} too"
            assert self.producers[serial].name == end.name, f"{end}: of another name"

    def _check_lease(self, end: End, outcome: kvwire.Outcome) -> None:
        """A side that asks, and has met its peer, needs no lease on a sound link.

        Neither does a producer whose consumer has everything.
        """
        by_lease = any(
            "while a peer was missing" in one for one in outcome.missing.reasons
        )
        # A producer that waits for another consumer sends the same reason to this one.
        shared = any(one.consumers > 1 for one in self.ends if one.name == end.name)
        if not by_lease or shared or not self._sound:
            return
        linked = Inside.met_on_a_link(end, SOON_S)
        assert not (end.asks and linked), f"{end}: has a link, and waited for its lease"
        served = [
            one
            for one in self.ends
            if end.produces
            and not one.produces
            and one.serial == end.serial
            and one.outcome is not None
            and one.outcome.complete
            and one.communicator is one.node.communicator
        ]
        assert not served, f"{end}: does not know that {served[0]} has everything"

    @property
    def _sound(self) -> bool:
        """Whether nothing has disturbed links or memory for a while."""
        if self._stopped or self._closing or self._restarting or self.shortages:
            return False
        return bool(self.loop.time() - self._disturbed_at > SOON_S)

    def _disturb(self) -> None:
        self._disturbed_at = self.loop.time()

    def _recycle(self, end: End) -> None:
        """Give the blocks a new owner: nothing reads or writes them for this one."""
        Inside.check_untouched(end)
        if not end.produces:
            self._check_bytes(end, end.landed)
        end.recycled = True
        end.node.fill(end.blocks, FREE)
        end.node.free += end.blocks

    def mark(self, end: End, parts: set[Part], *, later: bool) -> None:
        """Write layers of a range of positions, and mark them ready."""
        layers = sorted({layer for layer, _ in parts})
        places = sorted({position for _, position in parts})
        waits: asyncio.Future[None] | None = None
        if later:
            waits = self.loop.create_future()
            end.behind.append((waits, parts))
        else:
            self._write(end, parts)
        end.unmarked -= parts

        async def call() -> None:
            end.end.ready(
                slice(layers[0], layers[-1] + 1),
                slice(places[0], places[-1] + 1),
                after=waits,
            )

        self.run(call())

    def _write(self, end: End, parts: set[Part]) -> None:
        for layer, position in parts:
            if end.recycled:
                return
            value = end.serial * 64 + layer * 16 + position
            end.node.tensors[layer][end.blocks[position]] = value

    def come_true(self, end: End, *, well: bool) -> None:
        """Let what a mark waits for happen, or fail."""
        waits, parts = end.behind.pop(0)
        if well:
            self._write(end, parts)
            waits.set_result(None)
        else:
            waits.set_exception(RuntimeError("the forward pass failed"))
            waits.exception()

    def extend(self, end: End) -> None:
        position = COUNT - len(end.unnamed)
        block = end.unnamed.pop(0)
        end.end.extend([block])
        end.unmarked |= {(layer, position) for layer in range(LAYERS)}

    def finish(self, end: End, *, partial: bool) -> None:
        """Commit; nothing is named or marked after that."""
        end.finished = True
        end.unmarked.clear()
        end.unnamed_for_good += end.unnamed
        end.unnamed.clear()

        async def call() -> None:
            end.end.finish(partial=partial)

        self.run(call())

    def mark_rest(self, end: End) -> None:
        """Name, write and mark what is left, part by part, and commit."""
        while end.unnamed:
            self.extend(end)
        for part in sorted(end.unmarked):
            self.mark(end, {part}, later=False)
        self.finish(end, partial=False)

    def abort(self, end: End) -> None:
        async def call() -> None:
            end.end.abort("given up")

        self.run(call())

    def end_by_name(self, node: Node, name: str) -> None:
        async def call() -> None:
            inside.registry(node.communicator).end(name, "the engine says so")

        self.run(call())

    # --- links ------------------------------------------------------------------------

    def stop_reading(self, connection: Any) -> None:
        """One end of a link takes nothing in until :meth:`go_on`."""
        if connection in self._stopped:
            return
        self._disturb()
        link: Any = inside.link(connection)
        link._receive = lambda handler: None

        def go_on() -> None:
            del link._receive
            link.wake()

        self._stopped[connection] = go_on

    def break_unseen(self, connection: Any) -> None:
        """A link is lost for one end only; its peer takes it for alive for a while."""
        mine: Any = inside.link(connection)
        link = mine._peer
        link._into.outcome = lambda: None

        def go_on() -> None:
            link._into.__dict__.pop("outcome", None)
            link.wake()

        self._stopped[object()] = go_on
        self.cut(connection)

    def close_late(self, connection: Any) -> None:
        """A link is lost, and its transport may touch memory until :meth:`go_on`."""
        link: Any = inside.link(connection)
        link._finish = lambda handler, end: None

        def go_on() -> None:
            del link._finish
            link.wake()

        if not any(link is one for one, _ in self._closing):
            self._closing.append((link, go_on))
        self.cut(connection)

    def let_close(self) -> None:
        """Every transport of a lost link is through."""
        closing, self._closing = self._closing, []
        self._disturb()

        async def call() -> None:
            for _, go_on in closing:
                go_on()

        self.run(call())

    def go_on(self) -> None:
        """Nothing stands in the way of any link."""
        self.let_close()
        stopped, self._stopped = self._stopped, {}

        async def call() -> None:
            for go_on in stopped.values():
                go_on()

        self.run(call())

    def cut(self, connection: Any) -> None:
        self._disturb()

        async def call() -> None:
            connection.abort("cut")

        self.run(call())

    def dial(self, node: Node) -> None:
        self._disturb()

        async def call() -> None:
            if len(node.communicator.live_connections) < 3:
                with suppress(OSError):
                    await node.communicator.connect(self.address, timeout_s=1.0)

        self.run(call())

    def close_connection(self, connection: Any) -> None:
        self.let_close()
        self.run(connection.close())

    def restart(self, node: Node, *, graceful: bool) -> None:
        """End a process, and start it anew under the same name and address."""

        async def call() -> None:
            old = node.communicator
            if not graceful:
                old.abort()
            await old.close()
            await virtual_time.pass_time(NO_MEMORY_S * (1 + self.shortages))
            Inside.check_empty(old)
            await node.start()
            if node.index:
                with suppress(OSError):
                    await node.communicator.connect(self.address, timeout_s=1.0)

        mine = list(node.ends)
        self.let_close()
        self._restarting = True
        self.run(call())
        self._restarting = False
        self._disturb()
        for end in mine:
            assert end.end.done(), f"{end}: open after its process has ended"

    # --- what holds at any time -------------------------------------------------------

    def check(self) -> None:
        assert not self.troubles, self.troubles
        for node in self.nodes:
            Inside.check_tables(node.communicator)
            for tensor in node.tensors:
                edges = tensor[node.free, :, ::7, 0, 0]
                assert (edges == FREE).all(), "a write after `drained`"
            for end in node.ends:
                self._check_end(end)
            node.ends = [
                e for e in node.ends if not (e.recycled and e.follower is None)
            ]

    def _check_end(self, end: End) -> None:
        if end.follower is not None and end.follower.done():
            end.follower.result()
        if not end.produces and not end.recycled:
            layers = [one for one in range(LAYERS) if end.end.layer_landed(one)]
            parts = set(itertools.product(layers, range(COUNT)))
            if parts:
                self._check_bytes(end, parts)
        assert end.end.done() or not end.end.is_drained
        if end.end.done() and not end.produces:
            Inside.check_owed(end)

    # --- the end ----------------------------------------------------------------------

    def finish_all(self) -> None:
        """Let everything come to its end, and demand that nothing is left."""
        self.shortages = 0
        self.go_on()
        for end in self.ends:
            while end.behind:
                self.come_true(end, well=True)
        for end in self.open:
            if end.produces and not end.finished:
                self.mark_rest(end)
        for _ in range(40):
            self._work()
            self.rest(LEASE_S / 10)
            self.check()
        for end in self.open:
            assert end.verb in ("pull", "push"), f"{end}: open after its lease"
            self.abort(end)
        for _ in range(20):
            self._work()
            self.rest(LEASE_S / 5)
        self.check()
        for end in self.ends:
            assert end.follower is not None
            assert end.follower.done(), f"{end}: has not drained"
            assert self.begun[end.end] == self.ended[end.end] == 1, end
        self._check_agreement()
        for node in self.nodes:
            Inside.check_idle(node.communicator)
        self._names_are_free()

    def _work(self) -> None:
        for node in self.nodes:
            Inside.jobs(node.communicator).work()

    def _check_agreement(self) -> None:
        """What a producer names as landed is what its consumers have."""
        for end in self.ends:
            if not end.produces or not end.landed or end.name == "coded":
                continue  # what will not be decoded any more was acknowledged
            takers = [e for e in self.ends if not e.produces and e.serial == end.serial]
            full = [one for one in takers if end.landed <= one.landed]
            assert len(full) >= end.consumers, f"{end}: more than {takers} have"

    def _names_are_free(self) -> None:
        """What is over leaves no name tainted: each can be used anew, at once."""
        asker = self.nodes[1]
        if not asker.communicator.live_connections:
            self.dial(asker)
        for name in NAMES:
            by = asker.communicator.live_connections[0]
            out = self.begin(
                self.nodes[0], "publish", name, self.nodes[0].communicator, {}
            )
            inc = self.begin(asker, "pull", name, by, {})
            assert out is not None
            assert inc is not None
            self.mark(out, set(out.unmarked), later=False)
            self.finish(out, partial=False)
            for _ in range(5):
                self._work()
                self.rest(0.02)
            for end in (out, inc):
                assert end.end.done(), f"{end}: its name is not free"
                assert end.end.outcome.complete, end.end.outcome.missing.reasons
        self.rest(0.1)
        self.check()

    def close(self) -> None:
        """Close everything, whatever has failed before."""
        try:
            self.go_on()
            for node in self.nodes:
                self.run(self._close(node))
        finally:
            self._undo.__exit__(None, None, None)
            self._runner.close()

    async def _close(self, node: Node) -> None:
        await node.communicator.close()
        Inside.check_empty(node.communicator)
