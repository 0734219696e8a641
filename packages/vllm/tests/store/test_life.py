"""Both sides of the connector under a small vLLM: what is stored is what was computed.

The engine here shares blocks between requests, even those that one pass computes for
two of them, schedules ahead of its tokens, preempts, aborts, and changes its weights.
Each slot of a block holds a number that only its tokens and the weights give, so that a
block saved too early, too late or under another's name is seen.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvwire.kv.hashing import HashScheme
from kvwire_vllm.store.config import StoreSettings
from kvwire_vllm.store.lookup import Lookup
from kvwire_vllm.store.scheduler import NamedBlocks, StoreScheduler
from kvwire_vllm.store.scheduler import StoreStep as Step
from kvwire_vllm.store.worker import StoreWorker
from packages.vllm.tests.store.test_scheduler import Request
from packages.vllm.tests.support.fakes import (
    BLOCK_TOKENS,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    NAMES,
    SHAPE,
    Cached,
    New,
    Output,
)
from tests.support.waiting import eventually

CHUNK = 6  # tokens of a prompt that one pass computes
LENGTH = 26  # of a prompt and its answer, at most


def content(tokens: Sequence[int], weights: int) -> float:
    """What the slot of the last of these tokens holds."""
    return float(zlib.crc32(bytes([weights, *tokens])) % 2**20)


@dataclass(eq=False)
class Running:
    """A request as vLLM keeps it."""

    request: Request
    tokens: list[int]  # with those that its scheduler does not know yet
    length: int
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    new: bool = True

    @property
    def known(self) -> int:
        return len(self.request.all_token_ids)


class Vllm:
    """An engine of one worker."""

    def __init__(self, folder: Path, seed: int, tiers: tuple[str, ...]) -> None:
        self.chance = random.Random(seed)
        self.ahead = seed % 2 == 1  # it schedules a pass before it knows the last one
        file = folder / "worker"
        settings = StoreSettings(tiers=tiers, save_hold_s=0.05 if seed % 3 else 60.0)
        self.worker = StoreWorker(settings, [SHAPE], file)
        shape = (LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, 2 * DIM)
        self.memory = np.full(shape, -1, np.float32)
        self.worker.register(dict(zip(NAMES, self.memory, strict=True)))
        self.lookup = Lookup([file], 60.0)
        self.side = StoreScheduler(BLOCK_TOKENS, self.lookup.begin)
        self.scheme = HashScheme(BLOCK_TOKENS)
        self.weights = 0
        self.free = list(range(BLOCKS))
        self.uses = [0] * BLOCKS
        self.cached: dict[bytes, int] = {}
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.loading: dict[str, Running] = {}
        self.leaving: dict[str, Running] = {}  # ended, and their blocks are not free
        self.sampled: list[tuple[Running, int]] = []
        self.preempted: set[str] = set()
        self.named = 0
        self.seen: set[tuple[int, ...]] = set()

    def close(self) -> None:
        self.lookup.close()
        self.worker.close()

    # --- blocks -----------------------------------------------------------------------

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return self.scheme.block_hashes(list(tokens))

    def allocate(self, one: Running, tokens: int) -> bool:
        """Give it blocks for so many tokens, if there are enough."""
        lacking = -(-tokens // BLOCK_TOKENS) - len(one.ids)
        if lacking > len(self.free):
            return False
        for _ in range(lacking):
            block = self.free.pop(self.chance.randrange(len(self.free)))
            self.cached = {h: b for h, b in self.cached.items() if b != block}
            self.uses[block] = 1
            one.ids.append(block)
        return True

    def release(self, one: Running) -> None:
        for block in one.ids:
            self.uses[block] -= 1
            if not self.uses[block]:
                self.free.append(block)
        one.ids = []

    def cache(self, one: Running, tokens: int) -> None:
        full = min(tokens, one.known) // BLOCK_TOKENS
        for name, block in zip(self.hashes(one.tokens)[:full], one.ids, strict=False):
            self.cached.setdefault(name, block)

    # --- what happens -----------------------------------------------------------------

    def ask(self) -> None:
        """Begin a request whose prompt others begin with too."""
        base = [self.chance.randrange(3), *range(13)]
        tokens = base[: self.chance.randrange(3, 15)]
        self.named += 1
        request = Request(f"r{self.named}", tokens)
        one = Running(request, list(tokens), self.chance.randrange(15, LENGTH))
        self.waiting.append(one)
        self.side.begun(request)

    def preempt(self, one: Running) -> None:
        self.running.remove(one)
        self.preempted.add(one.request.request_id)
        self.release(one)
        one.computed = 0
        self.waiting.append(one)

    def end(self, one: Running) -> None:
        """It has its tokens, or its client has left."""
        for queue in (self.waiting, self.running):
            if one in queue:
                queue.remove(one)
        name = one.request.request_id
        self.seen.add(tuple(one.tokens))
        if self.side.finished(one.request) or name in self.loading:
            self.leaving[name] = one
        else:
            self.release(one)

    def reset(self) -> None:
        """Load other weights, as vLLM does: between passes, and with cleared caches."""
        if self.loading or any(one.ids for one in self.waiting):
            return  # vLLM does not while blocks are in use
        self.sample()
        for one in [*self.running]:
            self.preempt(one)
        self.cached = {}
        self.side.forgotten()
        assert self.lookup.forget()
        self.weights += 1

    def pass_(self) -> None:
        """Schedule, compute and report, in vLLM's order."""
        if not self.ahead:
            self.sample()
        output, parts = self.schedule()
        step: Step = self.side.step(output)
        # A request that ends now is computed once more, in blocks that it had.
        blocks = [list(one.ids) for one, _ in parts]
        self.sample()
        self.worker.fence(step)
        self.worker.begin_step(step)
        self.worker.start_loads()
        # A save that began before the pass may be over before it computes anything.
        self.lookup.begin(self.hashes(range(BLOCK_TOKENS))).result()
        for (one, tokens), ids in zip(parts, blocks, strict=True):
            for at in range(one.computed, one.computed + tokens):
                block, slot = ids[at // BLOCK_TOKENS], at % BLOCK_TOKENS
                self.memory[:, block, :, slot] = content(
                    one.tokens[: at + 1], self.weights
                )
        self.worker.step_written()
        sent, received = self.worker.finished()
        self.collect(sent, received, self.worker.take_errors())
        for one, tokens in parts:
            one.computed += tokens
            if one.computed == len(one.tokens):
                token = zlib.crc32(bytes(one.tokens)) % 50
                one.tokens.append(token)
                self.sampled.append((one, token))

    def sample(self) -> None:
        """Have the scheduler know the tokens of the last pass."""
        for one, token in self.sampled:
            one.request._all_token_ids.append(token)
            if one in self.running and one.known >= one.length:
                self.end(one)
        self.sampled = []

    def schedule(self) -> tuple[Output, list[tuple[Running, int]]]:
        parts: list[tuple[Running, int]] = []
        new: list[New] = []
        cached = Cached()
        for one in [*self.running]:
            if one not in self.running:
                continue
            tokens = min(CHUNK, len(one.tokens) - one.computed)
            had = len(one.ids)
            while not self.allocate(one, one.computed + tokens):
                self.preempt(self.running[-1])
                if one not in self.running:
                    break
            else:
                cached.req_ids.append(one.request.request_id)
                added = one.ids[had:]
                cached.new_block_ids.append((added,) if added else None)
                cached.num_computed_tokens.append(one.computed)
                parts.append((one, tokens))
                self.cache(one, one.computed + tokens)
        gone = self.preempted
        parts = [part for part in parts if part[0] in self.running]
        for one in [*self.waiting]:
            if one.request.request_id in gone or len(one.tokens) > one.known:
                continue
            if (tokens := self.admit(one)) == 0:
                continue
            self.waiting.remove(one)
            self.running.append(one)
            parts.append((one, tokens))
            # From now on others share them, in this very pass.
            self.cache(one, one.computed + tokens)
            name = one.request.request_id
            if one.new:
                new.append(New(name, (list(one.ids),), one.computed))
                one.new = False
            else:
                cached.req_ids.append(name)
                cached.new_block_ids.append((list(one.ids),))
                cached.num_computed_tokens.append(one.computed)
        counts = {one.request.request_id: tokens for one, tokens in parts}
        kept = [at for at, name in enumerate(cached.req_ids) if name in counts]
        cached = Cached(
            [cached.req_ids[at] for at in kept],
            [cached.new_block_ids[at] for at in kept],
            [cached.num_computed_tokens[at] for at in kept],
        )
        self.preempted = set()
        return Output(counts, new, cached, gone), parts

    def admit(self, one: Running) -> int:
        """Give a waiting request its blocks; return how much of it is computed now."""
        name = one.request.request_id
        if name in self.loading:
            return 0
        if not one.ids:
            usable = self.hashes(one.tokens[: len(one.tokens) - 1])
            hits = []
            for hash_ in usable:
                if hash_ not in self.cached:
                    break
                hits.append(self.cached[hash_])
            found, _ = self.side.matched(one.request, len(hits) * BLOCK_TOKENS)
            lacking = -(-len(one.tokens) // BLOCK_TOKENS) - len(hits)
            free = [block for block in self.free if block not in hits]
            if found is None or lacking > len(free):
                return 0
            for block in hits:
                if not self.uses[block]:
                    self.free.remove(block)
                self.uses[block] += 1
            one.ids = hits
            one.computed = len(hits) * BLOCK_TOKENS
            assert self.allocate(one, len(one.tokens))
            self.side.allocated(one.request, [one.ids], found)
            if found:
                one.computed += found
                self.loading[name] = one
                return 0
        return min(CHUNK, len(one.tokens) - one.computed)

    def collect(self, sent: set[str], received: set[str], errors: set[int]) -> None:
        self.side.reported(sent, received)
        for name in received:
            one = self.loading.pop(name)
            bad = [at for at, block in enumerate(one.ids) if block in errors]
            if bad:
                one.computed = bad[0] * BLOCK_TOKENS
        for name in {*sent, *received} & self.leaving.keys():
            self.release(self.leaving.pop(name))

    def act(self) -> None:
        """Do anything that may happen between two passes."""
        dice = self.chance.random()
        anyone = [*self.waiting, *self.running]
        if dice < 0.3 and len(anyone) < 5:
            for _ in range(self.chance.randrange(1, 4)):
                self.ask()
        elif dice < 0.4 and anyone:
            one = self.chance.choice(anyone)
            if one not in [two for two, _ in self.sampled]:
                self.end(one)
        elif dice < 0.45 and self.running:
            one = self.chance.choice(self.running)
            if one not in [two for two, _ in self.sampled]:
                self.preempt(one)
        elif dice < 0.46:
            self.reset()

    def at_rest(self) -> bool:
        """Compute what is left; whether nothing holds a block any more."""
        self.pass_()
        queues = (self.waiting, self.running, self.loading, self.leaving)
        return not any(queues) and len(self.free) == BLOCKS


@contextmanager
def vllm(folder: Path, seed: int) -> Iterator[Vllm]:
    made = Vllm(folder, seed, ("memory:1MiB", f"disk:{folder}/kv?size=1MiB"))
    with closing(made):
        yield made


@pytest.mark.parametrize("seed", range(12))
def test_what_is_stored_is_what_was_computed(tmp_path: Path, seed: int) -> None:
    with vllm(tmp_path, seed) as engine:
        for _ in range(150):
            engine.act()
            engine.pass_()
        assert eventually(engine.at_rest)
        assert not engine.side.waiting
        stored = 0
        for tokens in engine.seen:
            names = engine.hashes(tokens)
            found = engine.lookup.begin(names).result()
            ids = list(range(found))
            engine.worker.begin_step(Step(loads=[NamedBlocks("d", names[:found], ids)]))
            engine.worker.start_loads()
            assert eventually(lambda: engine.worker.finished()[1] == {"d"})
            assert not engine.worker.take_errors()
            for at in range(found * BLOCK_TOKENS):
                block, slot = divmod(at, BLOCK_TOKENS)
                expected = content(tokens[: at + 1], engine.weights)
                assert (engine.memory[:, block, :, slot] == expected).all()
            stored += found
        assert stored or engine.weights  # which may have changed just before the end
