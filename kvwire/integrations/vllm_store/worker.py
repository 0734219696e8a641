"""A worker's side: its store, and what goes there and comes from it.

The layers are in parts, each a cache of its own for the store. A part is saved when its
last layer is written, and the parts of a prompt are loaded one behind the other; with
several, a prompt is reported when the first is here, and its forward pass waits for
each of the others. Nothing is reported as free before the store has let go of it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvwire import BlockStore, Communicator, Engine, PagedCache, StoreRequest
from kvwire.integrations.pages import open_store
from kvwire.integrations.vllm.caches import CacheShape, layer_caches, layer_index
from kvwire.integrations.vllm.worker import IDLE_WAIT_S
from kvwire.integrations.vllm_store.config import StoreSettings
from kvwire.integrations.vllm_store.lookup import answer
from kvwire.integrations.vllm_store.scheduler import NamedBlocks, StoreStep

logger: logging.Logger = logging.getLogger("kvwire.vllm")


class _Load:
    """Loads one request's blocks, part by part."""

    def __init__(
        self,
        engine: Engine,
        store: BlockStore,
        caches: Sequence[PagedCache],
        wanted: NamedBlocks,
        after: object,
    ) -> None:
        # For each part, whether all its blocks are here.
        self.here: list[Future[bool]] = [Future() for _ in caches]
        # It is reported when it is over, and not before.
        self.whole: bool = len(caches) == 1
        self.missing: set[int] = set()  # block ids that did not come, when it is over

        async def run(_: Communicator) -> None:
            try:
                for here, cache in zip(self.here, caches, strict=True):
                    request = store.get(wanted.hashes, cache, wanted.ids, after=after)
                    lost = (await request).missing.ids().tolist()
                    self.missing.update(lost)
                    # Never, if a GPU has failed that may still write to them.
                    await request.drained()
                    here.set_result(not lost)
                    if lost:
                        logger.warning(
                            "request %s: %d of %d blocks were not loaded: %s",
                            wanted.request_id,
                            len(lost),
                            len(wanted.ids),
                            "; ".join((await request).missing.reasons),
                        )
            except BaseException:
                self.missing.update(wanted.ids)
                raise
            finally:
                for here in self.here:
                    if not here.done():
                        here.set_result(False)

        self.done: Future[None] = engine.start(run)

    @property
    def ends(self) -> bool:
        """Tell whether the last part is here, or one did not come."""
        return self.here[-1].done()


class StoreWorker:
    """Does the connector's work in a worker's process."""

    def __init__(self, settings: StoreSettings, shape: CacheShape, file: Path) -> None:
        self._parts = settings.parts
        self._shape = replace(shape, fingerprint=settings.fingerprint)
        self._file = file
        tiers = settings.tiers_of(shape.rank, shape.ranks)
        self._engine, self._store = open_store("vllm-store", tiers, settings.write)
        address = self._engine.listen("127.0.0.1:0")
        file.unlink(missing_ok=True)
        file.write_text(str(address))
        self._answers = self._engine.start(lambda c: answer(c, self._match))
        self._caches: list[PagedCache] = []
        self._part_of: dict[str, int] = {}
        self._step = StoreStep()
        # Layers of each part that this step has not written.
        self._unwritten: defaultdict[int, set[str]] = defaultdict(set)
        self._saves: dict[str, list[Future[None]]] = {}
        self._loads: dict[str, _Load] = {}
        # Reported as here while their last parts were on their way.
        self._gated: dict[str, _Load] = {}
        self._leaving: set[str] = set()
        self._errors: set[int] = set()
        self._said: set[str] = set()

    def register(self, tensors: Mapping[str, Any]) -> None:
        """Take the caches of this worker."""
        names = sorted(self._shape.layers or tensors, key=layer_index)
        parts = np.array_split(np.array(names), min(self._parts, len(names)))
        first = self._shape.first_layer
        total = self._shape.model_layers or len(names)
        for number, part in enumerate(parts):
            layers = tuple(part.tolist())
            shape = replace(
                self._shape, layers=layers, first_layer=first, model_layers=total
            )
            cache = layer_caches(tensors, [shape]).cache
            self._caches.append(cache)
            self._part_of.update(dict.fromkeys(layers, number))
            first += len(layers)
            self._recorded(cache)  # before vLLM captures graphs: then none may allocate
        logger.info("rank %d: %r in %s", self._shape.rank, self._store, self._caches)

    def fence(self, step: StoreStep) -> None:
        """Return when the store does not touch blocks that a step may overwrite."""
        for request_id in step.fenced:
            if request_id not in step.leaving:
                wait(self._saves.pop(request_id, ()))
            if request_id in self._gated:
                wait((self._gated.pop(request_id).done,))
            elif request_id in self._loads:
                # It ended meanwhile: its report frees all its blocks.
                self._loads[request_id].whole = True

    def begin_step(self, step: StoreStep) -> None:
        """Begin a step: what it saves is known, and computed next."""
        self._step = step
        self._leaving |= step.leaving
        self._unwritten.clear()
        for name, part in self._part_of.items():
            self._unwritten[part].add(name)

    def start_loads(self) -> None:
        """Begin what this step loads; does not wait."""
        loads, self._step.loads = self._step.loads, []
        # Behind the kernels that used the blocks before.
        after = self._recorded(self._caches[0]) if loads else None
        for wanted in loads:
            self._loads[wanted.request_id] = _Load(
                self._engine, self._store, self._caches, wanted, after
            )

    def layer_written(self, name: str) -> None:
        """Save a part if this was its last layer."""
        part = self._part_of.get(name)
        if part is None or name not in self._unwritten[part]:
            return
        self._unwritten[part].discard(name)
        if not self._unwritten[part]:
            self._save(part)

    def step_written(self) -> None:
        """Save what no hook has named: the forward pass is over."""
        for part, left in self._unwritten.items():
            if left:
                left.clear()
                self._save(part)
        self._step.saves = []

    def wait_layer(self, name: str) -> None:
        """Wait until nothing that this forward pass reads of a layer is on its way."""
        part = self._part_of.get(name)
        if part is not None:
            for load in self._gated.values():
                load.here[part].result()

    def finished(self, _ended: Iterable[str] = ()) -> tuple[set[str], set[str]]:
        """Return requests whose blocks are free, and those that are loaded."""
        if self._step.idle:
            self._wait_idle()
        sent = {one for one in self._leaving if _over(self._saves.get(one, ()))}
        self._leaving -= sent
        for request_id in [one for one, saves in self._saves.items() if _over(saves)]:
            del self._saves[request_id]
        for request_id in [r for r, load in self._gated.items() if load.ends]:
            load = self._gated.pop(request_id)
            wait((load.done,))
            self._errors |= load.missing
        received = set()
        for request_id, load in list(self._loads.items()):
            if load.done.done():
                self._errors |= load.missing
            elif not load.whole and load.here[0].done() and load.here[0].result():
                self._gated[request_id] = load
            else:
                continue
            received.add(request_id)
            del self._loads[request_id]
        return sent, received

    def take_errors(self) -> set[int]:
        """Return the blocks that did not come, once each."""
        errors, self._errors = self._errors, set()
        return errors

    def close(self) -> None:
        """End the store, once what was begun is over."""
        self._file.unlink(missing_ok=True)
        self._engine.start(lambda _: self._store.close()).result()
        self._engine.close()

    # --- inside -----------------------------------------------------------------------

    async def _match(self, hashes: list[bytes]) -> int:
        """Return how many leading blocks of a chain are here in every part."""
        found = len(hashes)
        for cache in self._caches:
            found = await self._store.match(hashes[:found], cache) if found else 0
        return found if self._caches else 0

    def _save(self, part: int) -> None:
        for named in self._step.saves:
            saves = self._saves.setdefault(named.request_id, [])
            saves.append(self._put(self._caches[part], named))

    def _recorded(self, cache: PagedCache) -> object:
        """Return an event behind this thread's queued work, if a GPU's."""
        if cache.device is None:
            return None
        devices = self._store._threads.devices  # noqa: SLF001 - the library's own
        return devices.prepare(cache.device, None)

    def _put(self, cache: PagedCache, named: NamedBlocks) -> Future[None]:
        """Begin to save blocks; the result comes when they are free."""
        after = self._recorded(cache)

        async def run(_: Communicator) -> None:
            request = self._store.put(named.hashes, cache, named.ids, after=after)
            await request.drained()
            self._note(request)

        return self._engine.start(run)

    def _note(self, request: StoreRequest) -> None:
        """Say, once for each reason, why blocks were not saved."""
        outcome = request.outcome
        for reason in outcome.missing.reasons if outcome else ():
            if reason not in self._said and len(self._said) < 100:
                self._said.add(reason)
                logger.warning("blocks are not saved: %s", reason)

    def _wait_idle(self) -> None:
        """Let the thread that moves bytes have the interpreter, until one is done."""
        waiting: list[Future[Any]] = [load.done for load in self._loads.values()]
        waiting += [load.here[0] for load in self._loads.values()]
        for request_id in self._leaving:
            waiting += self._saves.get(request_id, ())
        waiting = [one for one in waiting if not one.done()]
        if waiting:
            wait(waiting, IDLE_WAIT_S, return_when=FIRST_COMPLETED)


def _over(saves: Iterable[Future[None]]) -> bool:
    return all(one.done() for one in saves)
