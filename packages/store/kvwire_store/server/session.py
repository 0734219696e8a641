"""One client of a store server: its requests, and their blocks.

Each request is a task that ends by itself: blocks at their deadline, everything when
the connection ends. Nothing here is ever cancelled, so a berth is given back only when
neither the link nor the store uses it any more.

Blocks that a get finds in memory are sent from there without a copy: their slots stay
pinned until the link has sent them, or until the deadline. A put's blocks are received
into free slots in the same way, and get their keys when all of them have arrived. Only
a part of memory may be pinned like this, so that stalled clients cannot pin all of it.
Beyond that, blocks go through a berth, as blocks in other tiers do.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvwire.aio import start_task
from kvwire.errors import (
    ConnectionClosed,
    KVWireError,
    RequestError,
    UsageError,
    error_text,
    sayable,
    shown,
)
from kvwire.kv.blocks import Ids, all_of, any_of
from kvwire.kv.fragments import Fragments
from kvwire.limits import NAME_CHARS_MAX
from kvwire.spi import (
    common_version,
    each_message,
    send_now,
    version_mismatch,
    when_released,
)
from kvwire_store.cleanup import drain_or_abort
from kvwire_store.images import images_in, line_of, payload_of
from kvwire_store.keys import NO_SLOT, Keys, Orders, all_found, once
from kvwire_store.limits import (
    STORE_INLINE_BYTES,
    STORE_NAMESPACES_MAX,
    STORE_REQUESTS_MAX,
    STORE_TIMEOUT_S,
)
from kvwire_store.namespace import ABSENT, DIGEST_BYTES, Namespace, of_tenant
from kvwire_store.operations.get import GetOperation
from kvwire_store.operations.group_request import ImageRequest
from kvwire_store.operations.put import NO_SLOTS, PutOperation
from kvwire_store.operations.verbs import carry_out
from kvwire_store.placement import BlockState, Placement, VerbKind, all_placed
from kvwire_store.server.messages import (
    TAG,
    VERSIONS,
    AnyRequest,
    Apply,
    ClientRow,
    Delete,
    Find,
    Flush,
    Found,
    Get,
    Put,
    ServerMessage,
    Stats,
    StoreDone,
    StoreHello,
    Touch,
    TransferMessage,
    VerbDone,
    decode_request,
    encode,
    namespace_in,
    payload_tag,
)
from kvwire_store.server.served import ServedStore
from kvwire_store.tiers.base import (
    FAILED,
    LANDED,
    MISSING,
    BlockResult,
    BlockResults,
)
from kvwire_store.tiers.slabs import rounded

if TYPE_CHECKING:
    from kvwire import Connection, Request

logger: logging.Logger = logging.getLogger("kvwire.store")

_PATIENCE: Final = timedelta(seconds=STORE_TIMEOUT_S)
_READ_ONLY: Final = "this server is read-only"


class ClientSession:
    """Serves one client of a store server."""

    def __init__(
        self, served: ServedStore, connection: Connection, tenant: str
    ) -> None:
        self._served = served
        self._store = served.store
        self._tiers = served.access.tiers
        self._move = served.access.run
        self._connection = connection
        # The tenant that the client is; "" without one.
        self._tenant = tenant
        # Blocks that cannot move between the link and slots are copied through berths:
        # a client that is slow, or silently dead, holds these but never a slot.
        self._berths = asyncio.Semaphore(served.berths)
        self._open: set[asyncio.Task[None]] = set()
        # Answers that the client has not read yet, and since when; the oldest first.
        self._unsent: dict[object, float] = {}
        # The memory of the answer to the request that is now being started.
        self._begun_bytes = 0
        # How many gets have only their images left to send; each of them has a berth.
        self._answered = 0
        self._asked = 0
        self._read_bytes = self._written_bytes = 0

    def row(self) -> ClientRow:
        """Return the client's name and counts, for reports."""
        peer = self._connection.peer
        return ClientRow(
            name=peer.name,
            address=str(peer.address or "")[:NAME_CHARS_MAX],
            requests=len(self._open),
            asked=self._asked,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            tenant=self._tenant,
        )

    @property
    def stalled_since(self) -> float:
        """Return when its oldest unread answer was sent; infinity if all are read."""
        return next(iter(self._unsent.values()), math.inf)

    async def run(self) -> None:
        """Serve until the connection ends, then wait for running requests.

        Cancel safety: never cancel it; the end of the connection ends it.
        """
        try:
            hello = decode_request(await self._connection.recv(TAG, deadline=_PATIENCE))
            if not isinstance(hello, StoreHello):
                raise UsageError(
                    f"the client's first message is {type(hello).__name__}, not a hello"
                )
            theirs = hello.version_min, hello.version_max
            version = common_version(VERSIONS, theirs)
            # Sent even without a common version, so that the client can report the
            # server's.
            await self._answer_with(self._served.welcome(self._tenant, version))
            if not version:
                raise version_mismatch(VERSIONS, theirs, "the client")
            while True:
                await self._served.memory.room()
                await each_message(self._connection, TAG, self._arrived)
        except ConnectionClosed:
            pass
        except KVWireError as exc:
            self.drop(str(exc))
        except Exception:
            # A bug here ends only this client's connection.
            logger.exception("store server: %s cannot be served", self._connection.peer)
            self.drop("it cannot be served here")
        finally:
            while self._open:
                await asyncio.wait(self._open)
            self._served.memory.forget(self)

    # --- requests ---------------------------------------------------------------------

    def _arrived(self, raw: memoryview) -> bool:
        """Begin a request; return whether there is memory for the next one."""
        request = decode_request(raw)
        nbytes = len(raw)
        memory = self._served.memory
        self._asked += 1
        full = len(self._open) - self._answered >= STORE_REQUESTS_MAX
        if full and not isinstance(request, Touch):
            raise UsageError(
                f"the client has more than {STORE_REQUESTS_MAX} requests open"
            )
        self._begun_bytes = 0
        answer = self._answer(request)
        if answer is not None:
            task = start_task(self._finish(answer))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            memory.hold(self, nbytes)
            self._release_after(task, nbytes + self._begun_bytes)
        return memory.has_room

    def _answer(self, request: AnyRequest) -> Awaitable[object] | None:
        """Start to answer a request; return the rest of the work, or None if done."""
        match request:
            case Put():
                return self._put(request)
            case Get():
                return self._get(request)
            case Find() if not self._tiers.below:
                keys = request.names.keys_of(self._tenant)
                orders = self._tiers.memory.orders(keys)
                return self._send(Found(request.number, orders.tobytes()))
            case Find():
                return self._find(request)
            case Touch():
                self._touch(request)
                return None
            case Stats():
                report = self._served.report(request.number, self._tenant)
                return self._send(report)
            case Flush() | Delete() | Apply():
                return self._do(request)
            case StoreHello():
                raise UsageError("the client sent a second hello")

    def _touch(self, request: Touch) -> None:
        """Count blocks as used; the server has not seen those read in place."""
        keys = request.names.keys_of(self._tenant)
        self._tiers.touch(keys)
        self._read_bytes += request.read_bytes
        self._tiers.read_in_place(request.read_blocks, request.read_bytes)

    async def _finish(self, answer: Awaitable[object]) -> None:
        """Wait until a request is answered, or else drop the client."""
        try:
            await answer
        except ConnectionClosed as exc:
            self._connection.abort(error_text(exc))
        except KVWireError as exc:
            self.drop(error_text(exc))
        except Exception:
            logger.exception(
                "store server: a request of %s failed", self._connection.peer
            )
            self.drop("its request failed here")

    def _send(self, reply: ServerMessage) -> Request[int] | None:
        """Send an answer; return the request if it could not be sent at once.

        The deadline ends a client that reads no answers.
        """
        body = encode(reply)
        if send_now(self._connection, TAG, body):
            return None
        sent = self._connection.send(TAG, body, deadline=_PATIENCE)
        if not sent.done():
            self._unsent[sent] = monotonic()  # bounded: STORE_REQUESTS_MAX
            when_released(sent, lambda: self._taken(sent))
            self._served.memory.hold(self, len(body))
            task = asyncio.current_task()
            if task in self._open:
                self._release_after(task, len(body))
            else:  # the request is being started
                self._begun_bytes += len(body)
        return sent

    async def _answer_with(self, reply: ServerMessage) -> None:
        """Send an answer, and wait until it was sent."""
        sent = self._send(reply)
        if sent is not None:
            await sent

    def _taken(self, sent: object) -> None:
        del self._unsent[sent]

    def _release_after(self, task: asyncio.Task[Any], nbytes: int) -> None:
        """Release held memory after a task whose frames refer to it."""
        memory = self._served.memory
        task.add_done_callback(lambda _: memory.release(self, nbytes))

    def drop(self, reason: str) -> None:
        """Disconnect the client, which broke a rule or holds too much memory."""
        logger.warning(
            "store server: dropped client %s: %s", self._connection.peer, reason
        )
        self._served.dropped += 1
        self._connection.abort(reason)

    # --- blocks -----------------------------------------------------------------------

    async def _find(self, request: Find) -> None:
        keys = request.names.keys_of(self._tenant)
        orders = await self._tiers.orders(keys)
        if request.kept and self._tiers.through:
            orders[~await self._tiers.kept(keys, touch=False)] = ABSENT
        await self._answer_with(Found(request.number, orders.tobytes()))

    def _put(self, request: Put) -> Awaitable[object] | None:
        """Store a few blocks at once if that is possible; otherwise return the work."""
        keys = request.names.keys_of(self._tenant)
        namespace, refusal = self._namespace(request, keys.size)
        image_bytes = namespace.image_bytes
        nbytes = keys.size * image_bytes
        if len(request.images) != (nbytes if nbytes <= STORE_INLINE_BYTES else 0):
            raise UsageError(
                f"the put has {len(request.images)} bytes of images instead of {nbytes}"
            )
        refusal = refusal or self._write_refusal(namespace)
        if refusal:
            return self._send(_all(request, BlockResult.REFUSED, refusal))
        if not request.images:
            return self._put_many(request, namespace, keys)
        if self._stored(request, namespace, keys):
            return self._send(StoreDone(request.number, bytes(keys.size)))
        return self._put_few(request, namespace, keys)

    def _stored(self, request: Put, namespace: Namespace, keys: Keys) -> bool:
        """Copy the images in a request into memory; return whether all have room now.

        Otherwise, or if memory has some of them already, all go the long way.
        """
        tiers = self._tiers
        memory = tiers.memory
        nbytes = namespace.image_bytes
        named = namespace.tenant
        tenant = tiers.tenants.number(named) if named else 0
        if (
            tiers.below
            or not memory.index.fits(nbytes, tenant)
            or len(set(keys.tolist())) < keys.size
            or memory.has_any(keys)
        ):
            return False
        images = request.images
        count = memory.fill_now(keys, images, nbytes, tenant, request.order, whole=True)
        if not count:
            return False
        memory.counts.written_blocks += count
        tiers.namespaces[namespace.digest] = namespace
        self._written_bytes += len(images)
        for counters in tiers.counters_of(namespace):
            counters.put_ended(len(images), there=count, blocks=count, present=0)
        return True

    async def _put_few(self, request: Put, namespace: Namespace, keys: Keys) -> None:
        """Put the blocks in a request into the store."""
        sent = np.frombuffer(request.images, np.uint8)
        images = images_in(sent, namespace.image_bytes, keys.size)
        blocks = ImageRequest(namespace, keys, images, request.order)
        await self._answer_with(await self._keep(request, blocks))

    async def _put_many(self, request: Put, namespace: Namespace, keys: Keys) -> None:
        """Put blocks into the store from the message after their request."""
        image_bytes = namespace.image_bytes
        async with self._berths, self._served.memory.berth(self) as berth:
            slots = await self._slots_for(keys, namespace)
            images = images_in(berth, image_bytes, keys.size)
            if slots.size:
                images = self._tiers.memory.images(slots, image_bytes)
            blocks = ImageRequest(namespace, keys, images, request.order)
            try:
                lost = await self._receive(request, payload_of(images))
                done = (
                    _all(request, BlockResult.FAILED, lost)
                    if lost
                    else await self._keep(request, blocks, slots)
                )
            except asyncio.CancelledError:
                slots = slots[:0]  # the link may still write to them
                raise
            finally:
                if slots.size:
                    self._tiers.memory.give_back(slots[slots != NO_SLOT])
                    self._served.lend(-keys.size * rounded(image_bytes))
        await self._answer_with(done)

    async def _keep(
        self, request: Put, blocks: ImageRequest, arrived: Ids = NO_SLOTS
    ) -> StoreDone:
        """Put images into the store; return the result of each."""
        put = PutOperation(self._tiers, (blocks,), arrived=arrived)
        await self._move(put)
        kept = put.landed(blocks)
        count = int(np.add.reduce(kept))
        self._written_bytes += count * blocks.namespace.image_bytes
        if count == kept.size:
            return StoreDone(request.number, bytes(count))
        results = np.where(kept, LANDED, FAILED)
        return StoreDone.of(request.number, results, "; ".join(put.reasons))

    async def _slots_for(self, keys: Keys, namespace: Namespace) -> Ids:
        """Take slots for new blocks; none if the blocks need a berth."""
        memory = self._tiers.memory
        nbytes = namespace.image_bytes
        none = np.empty(0, np.int64)
        lent = keys.size * rounded(nbytes)
        tenant = self._tiers.tenants.number(namespace.tenant)
        if not memory.index.fits(nbytes, tenant) or not all_of(once(keys)):
            return none
        if any_of(memory.index.find(keys) >= 0) or not self._served.lend(lent):
            return none
        slots = none
        try:
            slots = await memory.take(nbytes, keys.size, tenant)
            if slots.size == keys.size:
                return slots
            memory.give_back(slots)
            return none
        finally:
            if slots.size < keys.size:
                self._served.lend(-lent)

    async def _receive(self, request: Put, into: memoryview | Fragments) -> str:
        """Receive a put's blocks; return why some did not arrive completely, or ""."""
        images = self._connection.recv(
            payload_tag(request.number), into, deadline=_deadline(request)
        )
        try:
            came = await images
        except RequestError as exc:
            return f"its blocks did not arrive: {error_text(exc)}"
        finally:
            await drain_or_abort(images, self._connection)
        return (
            "" if came == into.nbytes else f"only {came} of {into.nbytes} bytes arrived"
        )

    def _get(self, request: Get) -> Awaitable[object] | None:
        """Send a few bytes at once if all are in memory; otherwise return the work."""
        memory = self._tiers.memory
        keys = request.names.keys_of(self._tenant)
        namespace, refusal = self._namespace(request, keys.size)
        if refusal:
            return self._send(_all(request, BlockResult.REFUSED, refusal))
        if keys.size * namespace.image_bytes > STORE_INLINE_BYTES:
            return self._get_many(request, namespace, keys)
        slots = memory.index.find(keys)
        if not all_found(slots):
            return self._get_many(request, namespace, keys)
        orders = memory.index.orders(slots).tobytes()
        images = memory.line(slots, namespace.image_bytes)
        self._tiers.got(keys, namespace, slots)
        self._read_bytes += len(images)
        kept = self._kept(keys, slots)
        results = bytes(keys.size)
        return self._send(
            StoreDone(request.number, results, "", orders, images, kept=kept)
        )

    async def _get_many(self, request: Get, namespace: Namespace, keys: Keys) -> None:
        """Report the present blocks, and send them."""
        memory = self._tiers.memory
        nbytes = keys.size * rounded(namespace.image_bytes)
        async with self._berths, self._served.memory.berth(self) as berth:
            slots = memory.index.find(keys)
            if all_found(slots) and self._served.lend(nbytes):
                memory.index.pin(slots)
                try:
                    orders = memory.index.orders(slots)
                    found = memory.images(slots, namespace.image_bytes)
                    results = np.zeros(keys.size, np.uint8)
                    await self._send_found(request, results, "", orders, found)
                finally:
                    memory.unpin(slots)
                    self._served.lend(-nbytes)
                self._tiers.touch(keys, released=True)
                self._tiers.got(keys, namespace)
                return
            room = images_in(berth, namespace.image_bytes, keys.size)
            blocks = ImageRequest(namespace, keys, room)
            got = GetOperation(self._tiers, (blocks,))
            await self._move(got)
            landed = got.landed(blocks)
            results = np.where(landed, LANDED, FAILED)
            results[got.absent(blocks)] = MISSING
            reason = "; ".join(got.reasons)
            found = room.selected(landed)
            await self._send_found(request, results, reason, blocks.orders, found)

    async def _send_found(
        self,
        request: Get,
        results: BlockResults,
        reason: str,
        orders: Orders,
        found: Fragments,
    ) -> None:
        """Answer a get, and send the images of the blocks that landed."""
        kept = b""
        if self._tiers.through:
            keys = request.names.keys_of(self._tenant)
            kept = self._kept(keys, self._tiers.memory.index.find(keys))
        # The request determines where images are sent, since the client knows nothing
        # else.
        asked_bytes = results.size * namespace_in(request.namespace).image_bytes
        inline = asked_bytes <= STORE_INLINE_BYTES
        images = line_of(found) if inline else memoryview(b"")
        self._read_bytes += len(images)
        # From here on the client counts it as answered, and may send another request.
        self._answered += 1
        done = StoreDone.of(
            request.number, results, reason, orders.tobytes(), images, kept
        )
        try:
            if inline or not found.nbytes:
                await self._answer_with(done)
            else:
                await self._send_images(request, done, found)
        finally:
            self._answered -= 1

    def _kept(self, keys: Keys, slots: Ids) -> bytes:
        """Return which blocks a tier below memory keeps; empty for all of them."""
        if not self._tiers.through:
            return b""
        kept = self._tiers.known_kept(keys, slots)
        return b"" if all_of(kept) else kept.tobytes()

    async def _send_images(
        self, request: Get, done: StoreDone, images: Fragments
    ) -> None:
        """Send an answer and its images."""
        # The images are announced first: the client has memory for them already.
        sent = self._connection.send(
            payload_tag(request.number), payload_of(images), deadline=_deadline(request)
        )
        try:
            await self._answer_with(done)
            self._read_bytes += await sent
        except RequestError as exc:
            # The client did not take the images by their deadline.
            logger.debug("store server: blocks were not taken: %s", error_text(exc))
        finally:
            await drain_or_abort(sent, self._connection)

    async def _do(self, request: Flush | Delete | Apply) -> None:
        if isinstance(request, Apply):
            await self._answer_with(await self._placed(request))
        else:
            await self._answer_with(await self._done(request))

    async def _done(self, request: Flush | Delete) -> StoreDone:
        """Execute a request; the answer has the reason if it failed."""
        if self._served.read_only:
            # Nothing was put through this server, so there is nothing to flush.
            reason = "" if isinstance(request, Flush) else _READ_ONLY
            return StoreDone(request.number, reason=reason)
        try:
            if isinstance(request, Flush):
                await self._store.flush()
                return StoreDone(request.number)
            deleted = await self._delete(request)
            return StoreDone(request.number, deleted=deleted)
        except (OSError, UsageError) as exc:
            return StoreDone(request.number, reason=sayable(error_text(exc)))

    async def _placed(self, request: Apply) -> VerbDone:
        """Execute a verb; the answer has the reason if it was refused."""
        try:
            return VerbDone.of(request.number, await self._placement(request))
        except (OSError, UsageError) as exc:
            return VerbDone(request.number, reason=sayable(error_text(exc)))

    async def _placement(self, request: Apply) -> Placement:
        verb = request.asked
        if self._served.read_only and verb.kind is not VerbKind.PREFETCH:
            return all_placed(len(request.names), BlockState.REFUSED, _READ_ONLY)
        asked = namespace_in(request.namespace)
        if self._tenant and asked.tenant not in ("", self._tenant):
            raise UsageError(_not_another(self._tenant, asked.tenant))
        hashes = [key[DIGEST_BYTES:] for key in request.names.keys_of("").tolist()]
        namespace = namespace_in(request.namespace, self._tenant)
        self._tiers.tenants.require(namespace.tenant)
        return await carry_out(self._tiers, verb, [namespace], hashes)

    async def _delete(self, request: Delete) -> int:
        """Delete blocks; return their number, or 0 if the request named them."""
        if request.names is not None:
            await self._tiers.delete(request.names.keys_of(self._tenant))
            return 0
        if request.digest:
            digest = of_tenant(request.digest, self._tenant)
            return await self._tiers.delete_namespace(digest)
        if self._tenant and request.tenant not in ("", self._tenant):
            raise UsageError(_not_another(self._tenant, request.tenant))
        return await self._store.delete_all(tenant=self._tenant or request.tenant)

    def _namespace(self, request: TransferMessage, count: int) -> tuple[Namespace, str]:
        """Return the namespace of a request's blocks in this store, and a refusal.

        Returns:
            The namespace, and why the request's blocks cannot move; empty if they can.
        """
        asked = namespace = namespace_in(request.namespace)
        if self._tenant:
            if asked.tenant:
                return asked, _not_another(self._tenant, asked.tenant)
            namespace = namespace_in(request.namespace, self._tenant)
        if not request.names.all_in(asked):
            return namespace, "a key has another namespace than the request"
        most_bytes = self._served.berth_bytes
        if count * namespace.image_bytes > most_bytes:
            return namespace, (
                f"{count} blocks of {namespace.image_bytes} bytes are "
                f"more than the {most_bytes} that one transfer may move here"
            )
        return namespace, ""

    def _write_refusal(self, namespace: Namespace) -> str:
        if self._served.read_only:
            return _READ_ONLY
        known = self._tiers.namespaces
        if namespace.digest not in known and len(known) >= STORE_NAMESPACES_MAX:
            return f"it already has blocks of {STORE_NAMESPACES_MAX} kinds of caches"
        return ""


def _not_another(tenant: str, other: str) -> str:
    return f"it is tenant {tenant}, and cannot act for {shown(other)}"


def _deadline(request: TransferMessage) -> timedelta:
    return timedelta(milliseconds=request.timeout_ms)


def _all(request: TransferMessage, result: BlockResult, reason: str) -> StoreDone:
    return StoreDone.of(
        request.number, np.full(len(request.names), result, np.uint8), reason
    )
