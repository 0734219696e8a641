"""A tier in a Mooncake Store: its master locates objects, its segments store them.

Mooncake handles placement, replicas, eviction and transports. This module implements
the rest of a tier's contract.

Mooncake's client blocks, cannot be cancelled, and moves only memory that was registered
with it. So every call has a *stage*, a registered buffer: images are copied into it
before the call, or out of it afterwards. A call that misses its deadline is abandoned
together with its stage, and never touches an image. The stage is reused once the call
returns; meanwhile another stage replaces it, up to a limit. If no stage is left, or the
master cannot be reached, the tier is skipped until the master answers again. Closing
the client during a call would kill the process. So it is closed once the last call has
returned, which may be long after the tier was closed.
"""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvwire.aio import run_to_completion
from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.kv.blocks import Bits
from kvwire.limits import MIB
from kvwire_store.address import TierAddress
from kvwire_store.keys import Keys
from kvwire_store.namespace import Namespace
from kvwire_store.tiers.base import (
    FAILED,
    LANDED,
    MISSING,
    REFUSED,
    Batch,
    BlockResult,
    BlockResults,
)
from kvwire_store.tiers.object_format import HEAD_BYTES, stage
from kvwire_store.tiers.values import Head, KeyValueTier

with needed_by(
    "a tier in Mooncake Store", extra="mooncake", distribution="kvwire-store"
):
    from mooncake.store import MooncakeDistributedStore

T = TypeVar("T")
Stage = npt.NDArray[np.uint8]

# One stage is filled or emptied while another one is in a call.
_STAGES: Final = 2
# The limit, including the stages of abandoned calls.
_STAGES_MAX: Final = 8
# Mooncake's error codes, from `toErrorCode` in its types.h.
_NO_ROOM: Final = -200
_NOT_FOUND: Final = -704
_OPTIONS: Final = (
    "prefix",
    "timeout",
    "buffer",
    "host",
    "metadata",
    "protocol",
    "device",
    "segment",
)
# The size of the client's own buffer, for calls that are not used here.
_LOCAL_BYTES: Final = 16 * MIB


class MooncakeTier(KeyValueTier):
    """Keeps blocks in a Mooncake Store. Made by :meth:`open`.

    Its address is ``mooncake://MASTER:PORT?host=THIS_HOST``. Options: ``prefix``,
    ``timeout`` in seconds, ``buffer`` (the largest block), ``metadata`` (a metadata
    server), ``protocol`` (tcp or rdma), ``device`` (for RDMA), and ``segment``, the
    memory that this process contributes to the store.
    """

    asks: bool = True

    def __init__(self, address: TierAddress) -> None:
        address.require(*_OPTIONS)
        super().__init__(address)
        if not re.fullmatch(r"//.+:\d{1,5}", address.place):
            raise UsageError(f"tier {address.text!r}: write mooncake://MASTER:PORT")
        options = address.options
        master = address.place.removeprefix("//")
        host, _, port = master.rpartition(":")
        self._master = host, int(port)
        self._buffer_bytes = address.size_option("buffer", 32 * MIB)
        # The arguments for the client's `setup`.
        self._arguments = (
            options.get("host", "127.0.0.1"),
            options.get("metadata", "P2PHANDSHAKE"),
            address.size_option("segment", 0),
            _LOCAL_BYTES,
            options.get("protocol", "tcp"),
            options.get("device", ""),
            master,
        )
        self._native: Any = None
        # For each running call, the event that is set when it returns.
        self._calls: weakref.WeakSet[threading.Event] = weakref.WeakSet()
        self._stages: asyncio.Queue[Stage] = asyncio.Queue()
        self._stages_made = 0

    @property
    def taking(self) -> bool:
        return self._native is not None and not self._upkeep.reason

    # --- values -----------------------------------------------------------------------

    async def heads(self, keys: Keys) -> list[Head]:
        """Return for each block whether it exists; its head is read with its image."""
        names = self._names(keys)
        codes = await self._ask(lambda native, _: native.batch_is_exist(names))
        if codes is None:
            return [BlockResult.FAILED] * keys.size
        there = BlockResult.LANDED
        absent = BlockResult.MISSING
        return [there if code == 1 else absent for code in codes]

    async def remove_folder(self, folder: str) -> None:
        pattern = f"^{folder}.*"
        removed = await self._ask(
            lambda native, _: native.remove_by_regex(pattern, True)
        )
        if removed is None or removed < 0:
            raise OSError(f"{self.name}: {self.error or f'error {removed}'}")

    async def put(self, batch: Batch) -> BlockResults:
        return await self._in_parts(batch, self._put_part)

    async def get_into(self, batch: Batch) -> BlockResults:
        return await self._in_parts(batch, self._get_part)

    def too_large(self, namespace: Namespace) -> str:
        nbytes = namespace.image_bytes
        return (
            self._too_large(nbytes) if HEAD_BYTES + nbytes > self._buffer_bytes else ""
        )

    def _too_large(self, nbytes: int) -> str:
        return (
            f"a block of {nbytes} bytes, with its head of {HEAD_BYTES}, is larger than "
            f"?buffer={self._buffer_bytes}"
        )

    async def _in_parts(
        self, batch: Batch, move: Callable[[Batch], Any]
    ) -> BlockResults:
        """Move a batch in parts that fit in a stage."""
        results = np.full(batch.keys.size, FAILED, np.uint8)
        nbytes = int(batch.images.lengths[0])
        step = self._buffer_bytes // (HEAD_BYTES + nbytes)
        if not step:
            self.note("put", self._too_large(nbytes))
            results.fill(REFUSED)
            return results
        for first in range(0, batch.keys.size, step):
            which = np.arange(first, min(first + step, batch.keys.size))
            part = batch.selected(which)
            results[which] = await move(part)
            batch.orders[which] = part.orders
            batch.tell(which, part)
        return results

    async def _put_part(self, batch: Batch) -> BlockResults:
        names = self._names(batch.keys)

        async def fill(memory: Stage) -> list[int]:
            return await self._threads.run(partial(stage, batch, memory))

        def put(native: Any, memory: Stage, begins: list[int]) -> Any:
            sizes = np.diff(begins).tolist()
            at = [int(memory.ctypes.data) + begin for begin in begins[:-1]]
            return native.batch_put_from(names, at, sizes)

        codes = await self._ask(put, fill)
        if codes is None:
            return np.full(batch.keys.size, FAILED, np.uint8)
        results = np.where(np.array(codes) == 0, LANDED, FAILED)
        full = np.array(codes) == _NO_ROOM
        results[full] = REFUSED
        if full.any():
            self.note("put", "its segments have no room")
        elif (results == FAILED).any():
            self.note("put", f"error {min(codes)} of a put")
        return results.astype(np.uint8)

    async def _get_part(self, batch: Batch) -> BlockResults:
        names = self._names(batch.keys)
        room = HEAD_BYTES + int(batch.images.lengths.max())
        results = np.full(batch.keys.size, FAILED, np.uint8)

        def get(native: Any, memory: Stage) -> Any:
            at = [int(memory.ctypes.data) + room * n for n in range(len(names))]
            return native.batch_get_into(names, at, [room] * len(names))

        async def take(memory: Stage, codes: list[int]) -> None:
            came = np.flatnonzero(np.array(codes) > 0)
            raws = [memory[room * n :][: codes[n]].data for n in came.tolist()]
            await self.unpack(batch, came, raws, results)

        codes = await self._ask(get, then=take)
        if codes is not None:
            results[np.array(codes) == _NOT_FOUND] = MISSING
            if (results == FAILED).any():
                self.note("get", f"error {min(codes)} of a get")
        return results

    async def remove(self, keys: Keys) -> Bits:
        """Remove objects; return the ones that no longer exist."""
        names = self._names(keys)
        codes = await self._ask(lambda native, _: native.batch_remove(names, True))
        if codes is None:
            return np.zeros(keys.size, np.bool_)
        gone: Bits = np.isin(np.array(codes), (0, _NOT_FOUND))
        if not gone.all():
            self.note("remove", f"error {min(codes)} of a remove")
        return gone

    # --- calls ------------------------------------------------------------------------

    async def _ask(
        self,
        call: Callable[..., T],
        fill: Callable[[Stage], Any] | None = None,
        then: Callable[[Stage, T], Any] | None = None,
    ) -> T | None:
        """Call the client on a thread, with a stage; return None after the timeout.

        Args:
            call: Called with the client, the stage and the result of ``fill``, if
                given.
            fill: Fills the stage before the call.
            then: Reads the stage after the call.
        """
        native = self._native
        if native is None or self._upkeep.reason:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                memory = await self._stages.get()
        except TimeoutError:
            self.lost(TimeoutError("calls to its client do not return"))
            return None
        future: asyncio.Future[T] | None = None
        try:
            filled = () if fill is None else (await fill(memory),)
            future = self._start(partial(call, native, memory, *filled))
            await asyncio.wait((future,), timeout=self._timeout_s)
            if not future.done():
                self.lost(TimeoutError(f"no answer within {self._timeout_s:g} s"))
                if self._stages_made < _STAGES_MAX:
                    self._add_stage(native)
                return None
            answer = future.result()
            if then is not None:
                await then(memory, answer)
            return answer
        except Exception as exc:  # noqa: BLE001 - whatever their binding raises
            self.lost(exc)
            return None
        finally:
            if future is None or future.done():
                self._stages.put_nowait(memory)
            else:  # abandoned, or nothing waits for it any more
                future.add_done_callback(lambda _: self._stages.put_nowait(memory))

    def _start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Call on a daemon thread, so that the process need not wait for it to end."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.add(returned := threading.Event())

        def settle(result: T | None, error: Exception | None) -> None:
            if error is None:
                future.set_result(cast("T", result))
            else:
                future.set_exception(error)
                # Retrieved here, since the call may have been abandoned.
                future.exception()

        def run() -> None:
            result = None
            error = None
            try:
                result = call()
            except Exception as exc:  # noqa: BLE001 - whatever their binding raises
                error = exc
            returned.set()
            with suppress(RuntimeError):  # the loop is closed, so nothing waits
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=run, name="kvwire-mooncake", daemon=True).start()
        return future

    def _names(self, keys: Keys) -> list[str]:
        return list(map(self.value_name, keys.tolist()))

    # --- the connection ---------------------------------------------------------------

    async def connect(self) -> None:
        """Create the client and its stages."""
        # Where nothing listens, Mooncake's client would wait for a minute.
        async with asyncio.timeout(self._timeout_s):
            _, writer = await asyncio.open_connection(*self._master)
        writer.close()
        native = await run_to_completion(
            self._start(partial(_connected, self._arguments))
        )
        try:
            for _ in range(_STAGES):
                self._add_stage(native)
        except BaseException:
            # A new client does not know the stages that were registered with this one.
            self._stages = asyncio.Queue()
            self._stages_made = 0
            self._start(native.close)
            raise
        self._native = native

    def _add_stage(self, native: Any) -> None:
        memory = np.zeros(self._buffer_bytes, np.uint8)
        code = native.register_buffer(memory.ctypes.data, memory.nbytes)
        if code:
            raise OSError(
                f"error {code}: its client refused to register kvwire's memory"
            )
        self._stages_made += 1
        self._stages.put_nowait(memory)

    async def is_back(self) -> bool:
        if self._native is None:
            await self.connect()
        code = await self._start(self._native.health_check)
        return code == 0 and not self._stages.empty()

    async def disconnect(self) -> None:
        native = self._native
        self._native = None
        if native is None:
            return
        calls = [returned for returned in self._calls if not returned.is_set()]
        closed = self._start(partial(_close, native, calls))
        if not calls:
            await run_to_completion(closed)


def _close(native: Any, calls: list[threading.Event]) -> None:
    """Close a client once its calls have returned. On a thread."""
    for returned in calls:
        returned.wait()
    native.close()


def _connected(arguments: tuple[Any, ...]) -> Any:
    """Return a client that has joined the store. On a thread."""
    client = MooncakeDistributedStore()
    code = client.setup(*arguments)
    if code:
        raise OSError(f"error {code}: the master {arguments[-1]} cannot be reached")
    return client
