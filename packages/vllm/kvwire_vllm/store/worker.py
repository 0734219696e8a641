"""A worker's side: its store, and the blocks that it saves and loads.

Blocks are saved when a forward pass has written them, and loaded before a prompt is
scheduled. No block is reported as free before the store has released it.
:mod:`kvwire_vllm.store.saving` limits how far saves may fall behind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from kvwire import PagedCache
from kvwire.errors import KVWireError, error_text
from kvwire_store.pages import Unsaved, open_store, require_room
from kvwire_store.store import access_to
from kvwire_vllm.caches import CacheShape, layer_caches
from kvwire_vllm.metrics import Observed
from kvwire_vllm.store.config import StoreSettings
from kvwire_vllm.store.lookup import answer
from kvwire_vllm.store.saving import SaveQueue, Saving
from kvwire_vllm.store.scheduler import NamedBlocks, StoreStep
from kvwire_vllm.worker import IDLE_WAIT_S

logger: logging.Logger = logging.getLogger("kvwire.vllm")
T = TypeVar("T")
# The part of the store's memory whose blocks may be under way to the tiers below.
_UNDER_WAY: Final = 4


class StoreWorker:
    """The connector's part in a worker's process."""

    def __init__(
        self, settings: StoreSettings, shapes: Sequence[CacheShape], file: Path
    ) -> None:
        named = settings.fingerprint
        # All shapes have the same block table, so each has the blocks that a request
        # names.
        self._shapes = tuple(replace(shape, fingerprint=named) for shape in shapes)
        self._rank = shapes[0].rank
        self._file = file
        tiers = settings.tiers_of(self._rank, shapes[0].ranks)
        self._engine, self._store = open_store("vllm-store", tiers, settings.write)
        access = access_to(self._store)
        self._devices = access.devices
        self._memory_bytes = access.tiers.memory.counts.size_bytes
        self._hold_s = settings.save_hold_s
        address = self._engine.listen("127.0.0.1:0")
        file.unlink(missing_ok=True)
        file.write_text(str(address))
        self._answers = self._engine.start(
            answer(self._engine.communicator, self._match, self._forget)
        )
        self._cache: PagedCache | None = None
        self._step = StoreStep()
        self._saves = SaveQueue(self._put, 1, self._hold_s)
        # By request, the ids of the blocks that were not loaded.
        self._loads: dict[str, Future[list[int]]] = {}
        self._errors: set[int] = set()
        self._unsaved = Unsaved()
        self._closed = False

    def register(self, tensors: Mapping[str, Any]) -> None:
        """Register the caches of this worker."""
        self._cache = layer_caches(tensors, self._shapes).cache
        require_room(self._engine, self._store, self._cache)
        groups = self._cache.groups.values()
        block_bytes = sum(group.spec.block_bytes for group in groups)
        most = max(1, self._memory_bytes // _UNDER_WAY // block_bytes)
        self._saves = SaveQueue(self._put, most, self._hold_s)
        self._recorded()  # before vLLM captures graphs, since nothing may allocate then
        logger.info("rank %d: %r in %s", self._rank, self._store, self._cache)

    def fence(self, step: StoreStep) -> None:
        """Wait until the store no longer touches blocks that a step may overwrite."""
        for request_id in step.fenced:
            self._saves.fence(request_id)

    def begin_step(self, step: StoreStep) -> None:
        """Begin a step whose metadata is known and whose KV is computed next."""
        self._step = step
        if step.forgotten:
            self._saves.forget()
        for request_id in step.leaving:
            self._saves.leave(request_id)
        if step.written:
            self._saves.add(step.written)

    def start_loads(self) -> None:
        """Begin the loads of this step, without waiting."""
        loads = self._step.loads
        self._step.loads = []
        # After the kernels that used the blocks before.
        after = self._recorded() if loads else None
        for wanted in loads:
            self._loads[wanted.request_id] = self._get(wanted, after)

    def step_written(self) -> None:
        """Save the KV of the ended forward pass."""
        saves = self._step.saves
        self._step.saves = []
        if saves:
            self._saves.add(saves)

    def finished(self, _ended: Iterable[str] = ()) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks are free, and the loaded requests."""
        if self._step.idle:
            self._saves.wait_idle(self._loads.values(), IDLE_WAIT_S)
        sent = self._saves.freed()
        received = {one for one, load in self._loads.items() if load.done()}
        for request_id in received:
            self._errors.update(self._loads.pop(request_id).result())
        return sent, received

    def take_errors(self) -> set[int]:
        """Return the blocks that could not be loaded, each once."""
        errors = self._errors
        self._errors = set()
        return errors

    def take_observed(self) -> Observed:
        """Return the figures about saves since the last call."""
        return self._saves.take_observed()

    def close(self) -> None:
        """Close the store once running work has ended. May be called repeatedly.

        Waiting saves may still begin for at most `save_hold_s` seconds.
        """
        if self._closed:
            return
        self._closed = True
        self._saves.close()
        self._file.unlink(missing_ok=True)
        self._engine.run(self._store.close())
        self._engine.close()

    # --- inside -----------------------------------------------------------------------

    async def _match(self, hashes: list[bytes]) -> int:
        """Return the number of a chain's leading blocks that are stored."""
        if self._cache is None:
            return 0
        found = await self._store.match(self._of_groups(hashes), self._cache)
        return min(found.values())

    async def _forget(self) -> bool:
        """Delete all blocks of this kind of cache; return whether that succeeded."""
        try:
            if self._cache is not None:
                await self._store.delete_all(self._cache)
        except (KVWireError, OSError) as exc:
            logger.warning("the store did not delete its blocks: %s", exc)
            return False
        return True

    def _of_groups(self, listed: list[T]) -> dict[str, list[T]]:
        """Return the list once per cache group; all groups have the same blocks."""
        return dict.fromkeys((shape.name for shape in self._shapes), listed)

    def _recorded(self) -> object:
        """Return an event behind this thread's queued work; None without a GPU."""
        assert self._cache is not None, "vLLM registers its caches first"
        if self._cache.device is None:
            return None
        return self._devices.prepare(self._cache.device, None)

    def _get(self, wanted: NamedBlocks, after: object) -> Future[list[int]]:
        """Begin to load blocks; the result is the list of blocks that failed."""
        assert self._cache is not None, "vLLM registers its caches first"
        cache = self._cache

        async def run() -> list[int]:
            request = None
            lost = list(wanted.ids)
            why = ""
            try:
                ids = self._of_groups(wanted.ids)
                hashes = self._of_groups(wanted.hashes)
                request = self._store.get(hashes, cache, ids, after=after)
                missing = (await request).missing
                each = [set(missing.ids(name).tolist()) for name in cache.groups]
                lost = sorted(set().union(*each))
                why = "; ".join(missing.reasons)
            except Exception as exc:  # noqa: BLE001 - it would end vLLM's engine
                why = error_text(exc)
            if request is not None:
                # This never returns if a failed GPU may still write to them.
                await request.drained()
            if lost:
                logger.warning(
                    "request %s: %d of %d blocks were not loaded: %s",
                    wanted.request_id,
                    len(lost),
                    len(wanted.ids),
                    why,
                )
            return lost

        return self._engine.start(run())

    def _put(self, named: NamedBlocks) -> Saving:
        """Begin to save blocks, behind this thread's queued work."""
        after = self._recorded()
        cache = self._cache
        assert cache is not None, "vLLM registers its caches first"
        free: Future[None] = Future()

        async def run() -> list[int]:
            lacking = list(range(len(named.ids)))
            try:
                ids = self._of_groups(named.ids)
                hashes = self._of_groups(named.hashes)
                request = self._store.put(hashes, cache, ids, after=after)
                await request.drained()
                free.set_result(None)
                missing = (await request).missing
                self._unsaved.note(request)
                lost = set().union(
                    *(missing.ids(name).tolist() for name in cache.groups)
                )
                lacking = [at for at in lacking if named.ids[at] in lost]
            except Exception as exc:  # noqa: BLE001 - it would end vLLM's engine
                logger.warning(
                    "request %s: %d blocks were not saved: %s",
                    named.request_id,
                    len(lacking),
                    error_text(exc),
                )
            finally:
                if not free.done():
                    free.set_result(None)
            return lacking

        return Saving(free, self._engine.start(run()))
