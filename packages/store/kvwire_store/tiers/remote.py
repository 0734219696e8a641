"""A tier in another process: ``kvwire://host:port``, which a store server serves.

Images move out of the store's memory and into it without a copy on this side. While the
server cannot be reached, calls fail at once with a reason; see
:mod:`kvwire_store.server.client`. Each block has its own result: blocks that had landed
before a server died stay landed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

import kvwire
from kvwire.aio import run_to_completion, start_task
from kvwire.config import Config
from kvwire.errors import ConnectionLost, KVWireError, UsageError, error_text
from kvwire.kv.blocks import Bits, Ids, any_of
from kvwire.kv.fragments import Fragments
from kvwire.limits import EAGER_BYTES_MAX, MIB
from kvwire.memory.copy import copy
from kvwire_store.address import TierAddress
from kvwire_store.cleanup import drain_or_abort
from kvwire_store.images import line_of, payload_of
from kvwire_store.keys import Keys, Orders, absent
from kvwire_store.limits import (
    STORE_INLINE_BYTES,
    STORE_KEYS_MAX,
    STORE_REQUEST_BYTES_MAX,
    STORE_TIMEOUT_S,
    STORE_TIMEOUT_S_MAX,
    STORE_TOUCHES_S,
)
from kvwire_store.namespace import ABSENT, UNKNOWN, Namespace
from kvwire_store.placement import BlockState, Placement, Placing, Verb
from kvwire_store.server.client import ActiveConnection, StoreClient
from kvwire_store.server.messages import (
    Delete,
    Find,
    Flush,
    Found,
    Get,
    Names,
    NamespaceText,
    NumberedReply,
    Put,
    StoreDone,
    Touch,
    namespace_told,
    payload_tag,
    text_of,
)
from kvwire_store.tiers.base import (
    FAILED,
    LANDED,
    REFUSED,
    AskedAct,
    Batch,
    BlockResults,
    Tier,
    TierAnswer,
    Touches,
    all_landed,
)

_READ_ONLY: Final = "this server is read-only"
_LANDED: Final = bytes((LANDED,))
_ALL: Final = slice(None)


class RemoteTier(Tier):
    """Keeps blocks at a store server. Made by :meth:`open`."""

    durable: bool = False
    asks: bool = False
    at_once_bytes: int = STORE_INLINE_BYTES

    def __init__(
        self, name: str, communicator: kvwire.Communicator, where: str, timeout_s: float
    ) -> None:
        super().__init__(name)
        self.error = ""
        self._communicator = communicator
        # How long a request's blocks may take.
        self._timeout_ms = max(1, int(timeout_s * 1000))
        self._client = StoreClient(communicator, where, timeout_s, self._changed)
        self._touches = Touches()
        self._within = timedelta(seconds=timeout_s)
        # Reports uses, unless a request does so first; and counts of reads in place.
        self._telling: asyncio.TimerHandle | None = None
        self._read_blocks = 0
        self._read_bytes = 0

    @classmethod
    async def open(cls, address: TierAddress) -> RemoteTier:
        """Open a tier: ``kvwire://HOST:PORT?psk_file=FILE&timeout=SECONDS``.

        Instead of a key: ``tls_cert_file``, ``tls_key_file``, ``tls_ca_file`` and
        ``tls_peers`` (with commas between them), as in :class:`kvwire.Config`.

        ``KVWIRE_*`` environment variables also apply, as for every communicator. If the
        server cannot be reached, ``error`` has the reason, and it is redialled.

        Cancel safety: nothing stays open.
        """
        address.require(*OPTIONS)
        if not address.place.startswith("//"):
            raise UsageError(f"tier {address.text!r}: write kvwire://HOST:PORT")
        timeout_s = address.number("timeout", STORE_TIMEOUT_S, STORE_TIMEOUT_S_MAX)
        communicator = await kvwire.open(client_config(address))
        where = address.place.removeprefix("//")
        tier = cls(address.text, communicator, where, timeout_s)
        try:
            await tier.dial()
        except BaseException as exc:
            await run_to_completion(communicator.close())
            if isinstance(exc, KVWireError):
                raise UsageError(f"tier {address.text!r}: {exc}") from exc
            raise
        return tier

    @property
    def connected(self) -> bool:
        """Whether the server can be reached at the moment."""
        return self._client.active is not None

    @property
    def taking(self) -> bool:
        active = self._client.active
        return active is not None and not active.welcome.read_only

    async def holds(self, keys: Keys) -> Bits:
        """See Tier. If a server has lower tiers, blocks only in memory do not count."""
        held: Bits = await self.find(keys, kept=True) != ABSENT
        return held

    async def find(self, keys: Keys, *, kept: bool = False) -> Orders:
        """Return the order of each block's image, or ``ABSENT``.

        Needs one round trip, unless the server's memory is read in place and that
        suffices.

        Args:
            keys: The blocks' keys.
            kept: Ignore blocks that are only in the memory of a server with tiers
                below it.
        """
        mapped = self.mapped
        if mapped is None or (kept and not mapped.alone):
            orders = absent(keys.size)
        else:
            orders = mapped.orders(keys)
            if mapped.complete or not any_of(orders == ABSENT):
                return orders
        lacking = (orders == ABSENT).nonzero()[0]
        try:
            active = self._client.now()
            if self._touches.used:
                await self._tell_touches(active)
            for part in _by_width(keys[lacking]):
                which = lacking[part]
                find = Find(next(active.numbers), Names.of(keys[which]), kept)
                found = (await active.call(find, Found)).table
                if found.size != which.size:
                    raise _lie(active, f"{found.size} orders of {which.size} blocks")
                orders[which] = found
            self.reason: str = ""
        except KVWireError as exc:
            self.error = self.reason = error_text(exc)
        return orders

    def touch(self, keys: Keys) -> None:
        """Record a use, which is sent with the next request.

        If the server's memory is read in place, the next request may be far off. Then
        the recorded uses are sent together after a short time.
        """
        self._touches.add(keys)
        if self.mapped is not None and self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(STORE_TOUCHES_S, self._tell_soon)

    def read_in_place(self, blocks: int, nbytes: int) -> None:
        self._counts.read_blocks += blocks
        self._read_blocks += blocks
        self._read_bytes += nbytes

    async def delete(self, keys: Keys) -> None:
        """Delete blocks of this client's tenant."""
        for which in _by_width(keys):
            await self._delete(Names.of(keys[which]))

    async def delete_namespace(self, digest: bytes) -> None:
        await self._delete(None, digest)

    async def apply(self, verb: Verb, namespace: Namespace, keys: Keys) -> Placement:
        """See Tier. A prefetch copies blocks into the server's own memory."""
        placing = Placing(keys.size)
        text = text_of(namespace)
        for which in _by_width(keys):
            names = Names.of(keys[which])
            try:
                told = await self._client.now().apply(verb, names, text)
            except UsageError as exc:
                placing.rule(which, BlockState.REFUSED, f"{self.name}: {exc}")
            except KVWireError as exc:
                why = f"{self.name}: {error_text(exc)}"
                placing.rule(which, BlockState.DEFERRED, why)
            else:
                placing.place(which, told)
        return placing.end()

    def namespaces(self) -> Iterable[Namespace]:
        active = self._client.active
        return tuple(_namespaces(active.welcome.namespaces)) if active else ()

    async def flush(self) -> None:
        try:
            active = self._client.now()
            await self._tell_touches(active)
            flush = Flush(next(active.numbers))
            self.error = (await active.call(flush, StoreDone)).reason
        except KVWireError as exc:
            self.error = error_text(exc)
        if self.error:
            raise OSError(f"{self.name}: {self.error}")

    async def close(self) -> None:
        try:
            await self.hang_up()
        finally:
            await self._communicator.close()

    async def dial(self) -> None:
        """Connect for the first time, and again whenever the connection is lost.

        Raises:
            KVWireError: Dialling again would not help: the address or the key is wrong.

        Cancel safety: safe, nothing stays connected.
        """
        await self._client.open()

    async def hang_up(self) -> None:
        """Close the connection, but not the communicator, which others may share.

        Cancel safety: safe, it may be called again.
        """
        if self._telling is not None:
            self._telling.cancel()
        await self._client.close()

    # --- inside -----------------------------------------------------------------------

    async def _delete(self, names: Names | None, digest: bytes = b"") -> None:
        """Let the server delete blocks."""
        try:
            active = self._client.now()
            delete = Delete(next(active.numbers), names, digest)
            done = await active.call(delete, StoreDone)
        except KVWireError as exc:
            raise OSError(f"{self.name}: {error_text(exc)}") from exc
        if done.reason:
            raise OSError(f"{self.name}: {done.reason}")

    def _changed(self) -> None:
        """React to a connection, a mapping or a loss of the server."""
        active = self._client.active
        self.error = self.reason = self._client.reason
        self.mapped = None if active is None else active.mapped
        # If its blocks are only in memory, the mapped index nearly always suffices.
        alone = self.mapped is not None and self.mapped.alone
        self.asks = active is not None and not alone
        self.asks_bytes = 0
        if active is not None:
            welcome = active.welcome
            self.asks_bytes = min(STORE_INLINE_BYTES, welcome.berth_bytes)
            self.durable = welcome.durable
            self.error = _READ_ONLY if welcome.read_only else ""

    def _tell_soon(self) -> None:
        """Start to send the recorded uses; see ``touch``."""
        self._telling = None
        if self._client.active is not None and self._touches.used:
            start_task(self._tell_or_lose(self._client.active))

    async def _tell_or_lose(self, active: ActiveConnection) -> None:
        # A lost connection is reported by the next call that needs it.
        with suppress(KVWireError):
            await self._tell_touches(active)

    async def _tell_touches(self, active: ActiveConnection) -> None:
        touched = self._touches.take()
        for which in _by_width(touched):
            read = self._read_blocks, self._read_bytes
            self._read_blocks = 0
            self._read_bytes = 0
            await active.tell(Touch(Names.of(touched[which]), *read))

    def _write(
        self, namespace: Namespace, batch: Batch
    ) -> Coroutine[Any, Any, BlockResults]:
        return self._move(namespace, batch, batch.orders, self._put)

    def _read(
        self, namespace: Namespace, batch: Batch
    ) -> Coroutine[Any, Any, BlockResults]:
        alike = np.zeros(batch.keys.size, np.uint8)
        return self._move(namespace, batch, alike, self._get)

    def too_large(self, namespace: Namespace) -> str:
        active = self._client.active
        if active is None or namespace.image_bytes <= active.welcome.berth_bytes:
            return ""
        return (
            f"a block of {namespace.image_bytes} bytes is more than the "
            f"{active.welcome.berth_bytes} that this server moves at once; "
            f"start it with a larger --berth"
        )

    async def _move(
        self, namespace: Namespace, batch: Batch, kinds: Orders, step: _Step
    ) -> BlockResults:
        """Move a batch in parts of one kind, none larger than the server's berths."""
        results = np.empty(batch.keys.size, np.uint8)
        results.fill(FAILED)
        try:
            active = self._client.active or self._client.now()
            most = active.welcome.berth_bytes // namespace.image_bytes
            if error := self.too_large(namespace):
                self.error = error
                return np.full(batch.keys.size, REFUSED, np.uint8)
            if self._touches.used:
                await self._tell_touches(active)
            if batch.keys.size == 1:
                async with active.berths:
                    results = await step(active, namespace, batch)
            else:
                for which, part in _parts(batch, kinds, min(most, STORE_KEYS_MAX)):
                    async with active.berths:
                        results[which] = await step(active, namespace, part)
                        batch.orders[which] = part.orders
                        batch.tell(which, part)
        except KVWireError as exc:
            self.error = error_text(exc)
        whole = all_landed(results)
        self._touches.moved(batch.keys if whole else batch.keys[results == LANDED])
        return results

    async def _put(
        self, active: ActiveConnection, namespace: Namespace, batch: Batch
    ) -> BlockResults:
        """Send a put and its images; return the results."""
        asked = self._asked(active, namespace, batch.keys)
        order = int(batch.orders[0])
        if batch.images.nbytes <= STORE_INLINE_BYTES:
            put = Put(*asked, order, line_of(batch.images))
            return self._checked(
                active, batch.keys.size, await active.call(put, StoreDone)
            )
        put = Put(*asked, order)
        images = active.connection.send(
            payload_tag(put.number),
            payload_of(batch.images),
            deadline=self._within,
        )
        try:
            done = await active.call(put, StoreDone)
            return self._checked(active, batch.keys.size, done)
        finally:
            await drain_or_abort(images, active.connection)

    async def _get(
        self, active: ActiveConnection, namespace: Namespace, batch: Batch
    ) -> BlockResults:
        """Request blocks, and receive the images that the server has."""
        get = Get(*self._asked(active, namespace, batch.keys))
        nbytes = namespace.image_bytes
        if batch.images.nbytes <= STORE_INLINE_BYTES:
            done = await active.call(get, StoreDone)
            answer = self._came(active, nbytes, batch.keys.size, done)
            results = self._told(batch, answer)
            if done.images:
                _put_into(done.images, batch.images.selected(results == LANDED))
            return results
        # The receive is posted before the request, so that the images can be sent
        # without waiting for this side.
        images = active.connection.recv(
            payload_tag(get.number), payload_of(batch.images), deadline=self._within
        )
        try:
            done = await active.call(get, StoreDone)
            answer = self._coming(active, batch.keys.size, done)
            results = self._told(batch, answer)
            room = batch.images.selected(results == LANDED)
            if room.nbytes:
                came = await images
                if came != room.nbytes:
                    raise _lie(active, f"{came} bytes of {len(room)} blocks")
        finally:
            await drain_or_abort(images, active.connection)
        if 0 < len(room) < results.size:
            # The images arrived contiguously, in the memory of the first blocks.
            line = memoryview(bytearray(room.nbytes))
            copy(batch.images.slice(0, room.nbytes), line)
            _put_into(line, room)
        return results

    def ask(self, namespace: Namespace, keys: Keys, act: AskedAct) -> bool:
        active = self._client.active
        if active is None:
            return False
        if self._touches.used:
            start_task(self._tell_or_lose(active))
        get = Get(*self._asked(active, namespace, keys))
        answered = partial(self._answered, active, namespace.image_bytes, keys, act)
        return active.post(get, answered)

    def _answered(
        self,
        active: ActiveConnection,
        nbytes: int,
        keys: Keys,
        act: AskedAct,
        found: NumberedReply | KVWireError,
    ) -> None:
        """Pass on the answer to a request that no task waits for."""
        try:
            if isinstance(found, KVWireError):
                raise found
            done = active.checked(found, StoreDone)
            answer = self._came(active, nbytes, keys.size, done)
        except Exception as exc:  # noqa: BLE001 - a read reports it, where it lasts
            self.error = error_text(exc)
            act(None)
            return
        if answer.landed is None:
            self._counts.read_blocks += keys.size
        else:
            results = np.frombuffer(answer.results, np.uint8)
            self._counts.count(results, written=False)
            self._touches.moved(keys[answer.landed])
        act(answer)

    def _came(
        self, active: ActiveConnection, nbytes: int, count: int, done: StoreDone
    ) -> TierAnswer:
        """Check a get's answer, with the images in it."""
        answer = self._coming(active, count, done)
        landed = answer.results.count(_LANDED)
        if len(done.images) != landed * nbytes:
            raise _lie(active, f"{len(done.images)} bytes of {landed} blocks")
        return answer

    def _coming(
        self, active: ActiveConnection, count: int, done: StoreDone
    ) -> TierAnswer:
        """Check a get's answer, without its images."""
        orders = done.orders
        kept = done.kept
        if kept and len(kept) != count:
            raise _lie(active, f"{len(kept)} marks of {count} blocks")
        landed: Bits | None = None
        # If all have landed, as mostly, what follows would find the same, and an array
        # for each step of it takes several times as long.
        if (
            done.results != bytes(count)
            or len(orders) != count
            or max(orders) >= UNKNOWN
        ):
            landed = self._checked(active, count, done) == LANDED
            table = np.frombuffer(orders, np.uint8)
            if any_of(landed) and (
                table.size != count or any_of(table[landed] >= UNKNOWN)
            ):
                raise _lie(active, f"{table.size} orders of {count} blocks")
        elif self.error:
            self._well(active)
        return TierAnswer(done.results, landed, orders, done.images, kept)

    @staticmethod
    def _told(batch: Batch, answer: TierAnswer) -> BlockResults:
        """Note orders and kept images of a batch; return the results."""
        here = _ALL if answer.landed is None else answer.landed
        if answer.landed is None or any_of(answer.landed):
            batch.orders[here] = np.frombuffer(answer.orders, np.uint8)[here]
        if answer.kept and batch.kept is not None:
            batch.kept[:] = np.frombuffer(answer.kept, np.bool_)
        return np.frombuffer(answer.results, np.uint8)

    def _asked(
        self, active: ActiveConnection, namespace: Namespace, keys: Keys
    ) -> _Asked:
        """Return the first fields of a put or get of some blocks."""
        text = text_of(namespace)
        return next(active.numbers), text, Names.of(keys), self._timeout_ms

    def _checked(
        self, active: ActiveConnection, count: int, done: StoreDone
    ) -> BlockResults:
        """Return the result of each block, from a valid answer."""
        results = done.table.copy()
        if results.size != count:
            raise _lie(active, f"{results.size} results of {count} blocks")
        if done.reason and any_of((results == FAILED) | (results == REFUSED)):
            self.error = done.reason
        elif self.error:
            self._well(active)
        return results

    def _well(self, active: ActiveConnection) -> None:
        """End the report of an error, after an answer without one."""
        if not active.welcome.read_only:
            self.error = ""


def _put_into(images: memoryview, room: Fragments) -> None:
    """Copy contiguous images to their places."""
    line = payload_of(room)
    if isinstance(line, memoryview):
        line[:] = images
    else:
        copy(images, line)


# The keys of Config by which a server and its clients know each other in mtls.
_CERTIFICATES: Final = ("tls_cert_file", "tls_key_file", "tls_ca_file", "tls_peers")
OPTIONS: Final = ("psk_file", *_CERTIFICATES, "timeout")
_Step = Callable[[ActiveConnection, Namespace, Batch], Awaitable[BlockResults]]
_Asked = tuple[int, msgspec.Raw, Names, int]


def client_config(address: TierAddress) -> Config:
    """Return the configuration of a store client, from a tier's options."""
    arguments: dict[str, Any] = {
        "message_bytes": STORE_REQUEST_BYTES_MAX,
        # A thousand keys, or a small block, are sent at once.
        "eager_bytes": EAGER_BYTES_MAX,
        # Credit is returned, in a frame of its own, once half of this has arrived.
        "window_bytes": 4 * MIB,
        # After a lost connection, requests are sent again or dropped.
        "resume": False,
    }
    if "directory" in address.options:
        arguments["directory"] = address.options["directory"]
    if "psk_file" in address.options:
        arguments |= {"trust": "psk", "psk_file": address.options["psk_file"]}
    given = {
        key: address.options[key] for key in _CERTIFICATES if key in address.options
    }
    if given:
        arguments |= {"trust": "mtls", **given}
        arguments["tls_peers"] = given.get("tls_peers", "").split(",")
    return Config.load(None, **arguments)


def _by_width(keys: Keys) -> Iterator[Ids]:
    """Yield the positions of keys for one message each: one length, not too many."""
    listed = list(map(len, keys.tolist()))
    for width in sorted(set(listed)):
        if listed.count(width) == keys.size:  # mostly
            same = np.arange(keys.size)
        else:
            same = (np.array(listed) == width).nonzero()[0]
        for first in range(0, same.size, STORE_KEYS_MAX):
            yield same[first : first + STORE_KEYS_MAX]


def _parts(
    batch: Batch, kinds: Orders, most: int
) -> Iterable[tuple[Ids | slice, Batch]]:
    """Split a batch into requests of bounded size, each for one kind of blocks."""
    keys = batch.keys.tolist()
    if len(keys) <= most and len(set(map(len, keys))) == len(set(kinds.tolist())) == 1:
        return ((slice(None), batch),)
    return _cut(batch, kinds, most)


def _cut(batch: Batch, kinds: Orders, most: int) -> Iterator[tuple[Ids, Batch]]:
    for same in _by_width(batch.keys):
        for kind in sorted(set(kinds[same].tolist())):
            alike = same[kinds[same] == kind]
            for first in range(0, alike.size, most):
                part = alike[first : first + most]
                yield part, batch.selected(part)


def _namespaces(told: Iterable[NamespaceText]) -> Iterator[Namespace]:
    for text in told:
        # A namespace that only a newer server understands has no blocks for this side.
        with suppress(UsageError):
            yield namespace_told(text)


def _lie(active: ActiveConnection, what: str) -> ConnectionLost:
    """Drop the connection: the server broke a rule. Return the error to raise."""
    active.connection.abort(what)
    return ConnectionLost(f"the server's answer has {what}")
