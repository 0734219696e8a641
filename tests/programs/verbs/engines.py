"""Random verbs of real engines' store: ``python -m tests.programs.verbs.engines``.

Two engines of vLLM save to a store server in this process, with memory for few of their
blocks and a disk for some more. Verbs come by HTTP through the proxy, which names a
prompt's blocks by its tokens, by Python at the server's store, and as hints beside
requests. What each has reported is compared with the indexes of the server's tiers, and
what an engine has in its own cache with the tokens that its next request need not
compute. Every answer is compared with that of an engine which computed it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from kvwire import BlockStore, StoreServer
from kvwire.kv.blocks import Bits
from kvwire.kv.hashing import HashScheme
from kvwire.observe.http import MetricsServer
from kvwire.store.keys import Keys, as_keys
from kvwire.store.order import described
from kvwire.store.server.orders import StoreOrders
from tests.programs.failover.arena import BLOCK_TOKENS, connector
from tests.programs.verbs.acts import VERBS, Wrong
from tests.support import inside
from tests.support.engines.hints import hints, log_hints
from tests.support.engines.models import make_model
from tests.support.engines.nursery import Nursery
from tests.support.engines.pairs import running
from tests.support.engines.serving import (
    Engine,
    before,
    engine,
    front,
    metric_of,
    prompt,
    tokens_of,
)

_PROMPTS: Final = 12
_BLOCKS: Final = 6  # of each prompt
_TOKENS: Final = 4  # of an answer
# A block has 256 KiB: room for 16 of 72 in memory, for 48 on the disk.
_MEMORY: Final = "memory:4MiB?slab=1MiB"
_DISK: Final = "size=12MiB&slab=1MiB"
# So that engines forget most prompts as well; vLLM takes no less for a full context.
_CACHE_BLOCKS: Final = "36"
# A pin without an end is drawn for few blocks, or the store would be full of them.
_TTL_S: Final = (0.5, 30.0)
_QUIET_S: Final = 0.02
_LOGGED_S: Final = 20.0
_HINTED: Final = ("prefetch", "demote", "pin", "retain")
_PLACED: Final = re.compile(r"a0: <Placement of (\d+) blocks: (?:(\d+) done)?")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, the names of its blocks, and how an engine answers it alone."""

    ids: list[int]
    hashes: list[bytes]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Truth:
    """Which blocks of an act are where.

    Attributes:
        memory: In the server's memory.
        disk: On its disk.
        kept: Pinned in any of the two.
        there: At the other server.
    """

    memory: Bits
    disk: Bits
    kept: Bits
    there: Bits

    @property
    def found(self) -> Bits:
        """Which the server has."""
        return self.memory | self.disk

    def claims(self, verb: str, to: str, before: Truth) -> Bits:
        """Return of which blocks a verb may report that they are done."""
        match verb:
            case "prefetch":
                return self.memory
            case "demote":
                return self.disk & ~self.memory
            case "pin":
                return self.kept
            case "unpin":
                return ~self.kept
            case "move":
                # What an engine has is seen by asking it.
                return self.there if to.startswith("kvwire://") else before.found
        return self.found


@dataclass(slots=True)
class Place:
    """The stores, the engines and the proxy."""

    store: BlockStore
    server: StoreServer
    other: BlockStore
    other_url: str
    engines: list[Engine]
    proxy: str
    client: httpx.AsyncClient
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    prompts: list[Prompt] = field(default_factory=list)
    digest: bytes = b""

    async def begin(self) -> None:
        """Let an engine answer all prompts, from KV of its own and for the store."""
        scheme = HashScheme(BLOCK_TOKENS)
        for number in range(_PROMPTS):
            ids = prompt(_BLOCKS * BLOCK_TOKENS + 1, 7000 + number)
            answer = await self._generate(self.engines[0], ids, cache_salt="alone")
            self.prompts.append(Prompt(ids, scheme.block_hashes(ids), answer))
            await self.ask(number, self.engines[0])
        await self.quiet()
        named = inside.tiers(self.store).memory.index.named().keys.tolist()
        hashes = set(self.prompts[-1].hashes)
        digests = {one[:-32] for one in named if one[-32:] in hashes}
        (self.digest,) = digests

    # --- acts -------------------------------------------------------------------------

    async def several(self) -> None:
        """Ask engines and carry out verbs at once; only answers are compared."""
        acts = [
            self.ask(self.draw.randrange(_PROMPTS), self.draw.choice(self.engines))
            if self.draw.random() < 0.5
            else self._report(*self._act())
            for _ in range(self.draw.randint(2, 6))
        ]
        await asyncio.gather(*acts)

    async def alone(self) -> None:
        """Carry out a verb, and compare what it reports with what is there."""
        verb, number, count, options = self._act()
        keys = self._keys(number, count)
        await self.quiet()
        before = self._truth(keys)
        told = await self._report(verb, number, count, options)
        await self.quiet()
        after = self._truth(keys)
        done = np.array([one == "done" for one in told["blocks"]])
        missing = np.array([one == "missing" for one in told["blocks"]])
        act = f"{verb} of {count} blocks of {number}, {options}: {told}"
        to = options.get("to", "")
        if (wrong := done & ~after.claims(verb, to, before)).any():
            raise Wrong(f"{act}: done, and not so: {np.flatnonzero(wrong)}")
        if (missing & before.found & after.found).any():
            raise Wrong(f"{act}: missing, and there")
        reasons = {at for which in told["reasons"].values() for at in which}
        if reasons != set(np.flatnonzero(~done).tolist()):
            raise Wrong(f"{act}: blocks without a reason, or done with one")
        if verb == "locate" and (before.found == after.found).all():
            memory, disk = (np.array(one) for one in [*told["held"].values()][:2])
            if (memory != after.memory).any() or (disk != after.disk).any():
                raise Wrong(f"{act}: located elsewhere than it is")
        if verb == "move" and to.startswith("http"):
            await self._check_moved(number, int(told["counts"].get("done", 0)), to)
        self.counts[verb] += 1
        self.counts.update({f"{verb} {k}": v for k, v in told["counts"].items()})

    async def hinted(self) -> None:
        """Carry out a hint beside a request, and compare what the engine's log says."""
        verb = self.draw.choice(_HINTED)
        payload: dict[str, Any] = {}
        if verb in ("pin", "retain"):
            payload["ttl_s"] = _TTL_S[1]
        if verb == "retain":
            payload["priority"] = 80
        asked = hints({"action_type": f"kv.{verb}", "payload": payload})
        number = self.draw.randrange(_PROMPTS)
        by = self.draw.choice(self.engines)
        await self.quiet()
        keys = self._keys(number, _BLOCKS)
        before = self._truth(keys)
        seen = len(_PLACED.findall(by.log.read_text(errors="replace")))
        await self.ask(number, by, **asked)
        end = time.monotonic() + _LOGGED_S
        while (
            len(placed := _PLACED.findall(by.log.read_text(errors="replace"))) == seen
        ):
            if time.monotonic() > end:
                raise Wrong(f"{verb} as a hint: nothing was logged")
            await _pause()
        await self.quiet()
        done = int(placed[-1][1] or 0)
        after = self._truth(keys)
        # Where the server may pin no more, or gets a block later, a block is done if
        # the engine's own memory has pinned it, which is not seen here.
        pinned = after.kept & ~before.kept
        if verb == "pin" and pinned.sum() > done:
            raise Wrong(f"a hint to pin {number}: {done} are done; {before}; {after}")
        self.counts[f"hint {verb}"] += 1
        self.counts[f"hint {verb} done"] += done

    async def ask(self, number: int, by: Engine, **more: Any) -> None:
        """Ask an engine, and compare its answer."""
        one = self.prompts[number]
        answer = await self._generate(by, one.ids, **more)
        if answer != one.answer:
            raise Wrong(f"{by.url} answers {number} with {answer}, not {one.answer}")
        self.counts["answers"] += 1

    async def quiet(self) -> None:
        """Wait until nothing is on its way to or in the server."""
        for _ in range(2):
            await _pause()
            while any(one.row().requests for one in inside.served(self.server).clients):
                await _pause()
            for store in (self.store, self.other):
                await inside.tiers(store).memory.settle()

    # --- inside -----------------------------------------------------------------------

    def _act(self) -> tuple[str, int, int, dict[str, Any]]:
        draw = self.draw
        verb = draw.choice(VERBS)
        options: dict[str, Any] = {}
        if verb in ("pin", "retain"):
            options["ttl_s"] = draw.choice(_TTL_S)
        if verb == "retain":
            options["priority"] = draw.choice((0, 50, 80))
        if verb == "prefetch":
            options["tier"] = "memory"
        if verb == "move":
            urls = [one.url for one in self.engines]
            options["to"] = draw.choice([*urls, *urls, self.other_url])
        return verb, draw.randrange(_PROMPTS), draw.randint(1, _BLOCKS), options

    async def _report(
        self, verb: str, number: int, count: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Carry out a verb by HTTP or by Python; return its report as JSON."""
        one = self.prompts[number]
        to = options.get("to", "")
        if to.startswith("http") or (not to and self.draw.random() < 0.6):
            self.counts["by HTTP"] += 1
            ids = one.ids[: count * BLOCK_TOKENS]
            order = {"prompt": ids, "model": "m", **options}
            said = await self.client.post(f"{self.proxy}/kv/{verb}", json=order)
            said.raise_for_status()
            found: dict[str, Any] = said.json()
            return found
        self.counts["by Python"] += 1
        call = getattr(self.store, verb)
        return described(await call(one.hashes[:count], **options))

    async def _check_moved(self, number: int, done: int, to: str) -> None:
        """Check that an engine need not compute what was moved to it."""
        if not done:
            return
        by = next(one for one in self.engines if one.url == to)
        had = await self._cached(by)
        ids = [*self.prompts[number].ids[: done * BLOCK_TOKENS], 7]
        await self._generate(by, ids, tokens=1)
        found = (await self._cached(by)) - had
        if found != done * BLOCK_TOKENS:
            raise Wrong(f"{done} blocks were moved to {to}, and it had {found} tokens")

    async def _cached(self, by: Engine) -> float:
        text = (await self.client.get(f"{by.url}/metrics")).text
        name = "vllm:prompt_tokens_by_source_total"
        return metric_of(text, name, 'source="local_cache_hit"')

    async def _generate(
        self, by: Engine, ids: list[int], tokens: int = _TOKENS, **more: Any
    ) -> list[int]:
        generate = asyncio.to_thread(by.generate, ids, tokens, **more)
        return tokens_of(await generate)

    def _keys(self, number: int, count: int) -> Keys:
        hashes: Sequence[bytes] = self.prompts[number].hashes[:count]
        return as_keys(self.digest + one for one in hashes)

    def _truth(self, keys: Keys) -> Truth:
        tiers = inside.tiers(self.store)
        indexes = [tiers.memory.index, tiers.below[0]._index]  # type: ignore[attr-defined]
        memory, disk = (index.find(keys) >= 0 for index in indexes)
        kept = indexes[0].kept(keys) | indexes[1].kept(keys)
        there = inside.tiers(self.other).memory.index.find(keys) >= 0
        return Truth(memory, disk, kept, there)


async def play(folder: Path, acts: int, seed: int, seconds: float) -> Counter[str]:
    """Start everything, carry out verbs, and return what was counted."""
    end = time.monotonic() + seconds
    model = make_model("gqa", folder)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        tiers = [_MEMORY, f"disk:{folder / 'kv'}?{_DISK}"]
        store = await enter(BlockStore.open(tiers))
        server = await enter(StoreServer(store, "127.0.0.1:0"))
        other = await enter(BlockStore.open([_MEMORY]))
        there = await enter(StoreServer(other, "127.0.0.1:0"))
        orders = StoreOrders(server)
        http = stack.enter_context(MetricsServer(store, "127.0.0.1:0", orders=orders))
        transfer = connector(_where(server), "8MiB")
        few = ("--num-gpu-blocks-override", _CACHE_BLOCKS)
        engines = [
            engine(model, folder, f"engine-{core}", core, {}, *few, alone=transfer)
            for core in (0, 1)
        ]
        for one in engines:
            log_hints(one, folder)
        behind = ("--store", http.url.removesuffix("/metrics"))
        proxy = front(folder, *before(engines, ["decode"] * 2), *behind)
        nursery = stack.enter_context(Nursery())
        started = running(*engines, proxy, starter=nursery.start)
        # They connect to the server, which is in this process.
        await asyncio.to_thread(started.__enter__)
        stack.callback(started.__exit__, None, None, None)
        client = await enter(httpx.AsyncClient(timeout=60))
        place = Place(
            *(store, server, other, f"kvwire://{_where(there)}", engines, proxy.url),
            client=client,
            draw=random.Random(seed),
        )
        await place.begin()
        while _acts(place.counts) < acts:
            if time.monotonic() > end:
                break
            what = place.draw.random()
            if what < 0.1:
                await place.several()
            elif what < 0.2:
                await place.hinted()
            elif what < 0.35:
                number = place.draw.randrange(_PROMPTS)
                await place.ask(number, place.draw.choice(engines))
            else:
                await place.alone()
        return place.counts


def main() -> int:
    """Run it; the exit status is 1 if something is not as it was reported."""
    parser = argparse.ArgumentParser(
        "python -m tests.programs.verbs.engines", description=__doc__
    )
    parser.add_argument("--acts", type=int, default=1000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    of_seconds = "no act begins later, counted from before the engines start"
    parser.add_argument("--seconds", type=float, default=math.inf, help=of_seconds)
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvwire-verbs-") as folder:
        found = asyncio.run(play(Path(folder), asked.acts, asked.seed, asked.seconds))
    load = ", ".join(f"{one:.0f}" for one in os.getloadavg())
    print(
        f"seed {asked.seed}: {_acts(found)} acts, each as it was "
        f"reported; {time.monotonic() - began:.0f} s, load {load}"
    )
    print(", ".join(f"{count} {name}" for name, count in sorted(found.items())))
    return 0


def _acts(counts: Counter[str]) -> int:
    """Return how many verbs and hints were compared with what is there."""
    names = (*VERBS, *(f"hint {verb}" for verb in _HINTED))
    return sum(counts[name] for name in names)


async def _pause() -> None:
    await asyncio.sleep(_QUIET_S)


def _where(server: StoreServer) -> str:
    return f"{server.address.host}:{server.address.port}"


if __name__ == "__main__":
    sys.exit(main())
