"""One client of a store server: its requests, and the blocks that move for them.

Each request is a task, and ends by itself: a transfer by its deadline, everything by
the end of the connection. Nothing here is ever cancelled, so a berth is given back only
when both the link and the store have let go of it.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import numpy as np

from kvwire.errors import ConnectionClosed, KVWireError, UsageError
from kvwire.kv.blocks import Bits, Ids, among
from kvwire.kv.outcome import Outcome
from kvwire.limits import (
    NAME_CHARS_MAX,
    REASON_CHARS_MAX,
    STORE_NAMESPACES_MAX,
    STORE_PIECES_MAX,
    STORE_REQUESTS_MAX,
    STORE_TIMEOUT_S,
)
from kvwire.store.cleanup import drain_or_abort
from kvwire.store.image_cache import ImageCache, images_in
from kvwire.store.index import Keys, as_keys
from kvwire.store.namespace import DIGEST_BYTES, ORDERS, Namespace
from kvwire.store.operations.get import NOT_THERE
from kvwire.store.server.buffers import Bytes, TransferBuffers
from kvwire.store.server.messages import (
    TAG,
    VERSION,
    AnyRequest,
    ClientRow,
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
    decode_request,
    encode,
)
from kvwire.store.tiers.base import BlockResult, BlockResults

if TYPE_CHECKING:
    from kvwire import Connection
    from kvwire.store.server.server import StoreServer

logger: logging.Logger = logging.getLogger("kvwire")

_PATIENCE: Final = timedelta(seconds=STORE_TIMEOUT_S)


class ClientSession:
    """Serves one client of a store server.

    Args:
        server: Whose client it is.
        connection: The connection to it.
    """

    def __init__(self, server: StoreServer, connection: Connection) -> None:
        self._server = server
        self._store = server.store
        self._tiers = server.store._tiers  # noqa: SLF001 - the library's own
        self._connection = connection
        self._berths = TransferBuffers(server.berths, server.berth_bytes)
        self._open: set[asyncio.Task[None]] = set()
        self._asked = 0
        self._read_bytes = self._written_bytes = 0

    def row(self) -> ClientRow:
        """Return who it is, and what it has done."""
        peer = self._connection.peer
        return ClientRow(
            name=peer.name,
            address=str(peer.address or "")[:NAME_CHARS_MAX],
            requests=len(self._open),
            asked=self._asked,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
        )

    async def run(self) -> None:
        """Serve it until its connection ends; then wait for what it had begun.

        Cancel safety: not to be cancelled; the end of the connection ends it.
        """
        try:
            hello = await self._received(_PATIENCE)
            if not isinstance(hello, StoreHello):
                raise UsageError(f"it began with {type(hello).__name__}")
            version = min(VERSION, hello.version)
            await self._send(
                self._server._welcome(  # noqa: SLF001
                    version, STORE_REQUESTS_MAX
                )
            )
            while True:
                self._begin(await self._received())
        except ConnectionClosed:
            pass
        except KVWireError as exc:
            self._drop(str(exc))
        except Exception:
            # A bug of ours ends this client's connection, and nobody else's.
            logger.exception("store server: %s cannot be served", self._connection.peer)
            self._drop("it cannot be served here")
        finally:
            while self._open:
                await asyncio.wait(self._open)

    # --- requests ---------------------------------------------------------------------

    async def _received(self, within: timedelta | None = None) -> AnyRequest:
        """Return its next request; a known client may take any time."""
        return decode_request(await self._connection.recv(TAG, deadline=within))

    def _begin(self, request: AnyRequest) -> None:
        self._asked += 1
        if isinstance(request, StoreHello):
            raise UsageError("it says hello twice")
        if isinstance(request, Touch):
            self._tiers.touch(request.names.keys)
            return
        if len(self._open) >= STORE_REQUESTS_MAX:
            raise UsageError(f"it has more than {STORE_REQUESTS_MAX} requests open")
        task = asyncio.create_task(self._answer(request))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _answer(self, request: Find | Put | Get | Flush | Stats) -> None:
        try:
            match request:
                case Find():
                    orders = await self._tiers.orders(request.names.keys)
                    await self._send(Found(request.number, orders.tobytes()))
                case Put():
                    await self._send(await self._put(request))
                case Get():
                    await self._get(request)
                case Flush():
                    await self._send(await self._flush(request))
                case Stats():
                    await self._send(
                        self._server._report(  # noqa: SLF001
                            request.number
                        )
                    )
        except ConnectionClosed as exc:
            self._connection.abort(str(exc))
        except KVWireError as exc:
            self._drop(str(exc))
        except Exception:
            logger.exception(
                "store server: a request of %s failed", self._connection.peer
            )
            self._drop("its request failed here")

    async def _send(self, reply: ServerMessage) -> None:
        """Answer; a client that takes no answers is ended by the deadline."""
        await self._connection.send(TAG, encode(reply), deadline=_PATIENCE)

    def _drop(self, reason: str) -> None:
        logger.warning("store server: %s dropped: %s", self._connection.peer, reason)
        self._server.dropped += 1
        self._connection.abort(reason)

    # --- blocks -----------------------------------------------------------------------

    async def _put(self, request: Put) -> StoreDone:
        """Pull blocks into a berth, and put those that landed into the store."""
        namespace = request.namespace.namespace()
        refusal = self._refusal(request, namespace) or self._write_refusal(namespace)
        if refusal:
            return _all(request, BlockResult.REFUSED, refusal)
        async with self._berths.one() as berth:
            images = _images(berth, request, namespace)
            cache, ids = images.cache, images.ids
            pulled = self._connection.pull(
                request.transfer,
                cache,
                {namespace.group: ids},
                deadline=_deadline(request),
            )
            outcome = await pulled
            await drain_or_abort(pulled, self._connection)
            reasons = outcome.missing.reasons
            kept = here = _landed(outcome, namespace, ids)
            if here.any():
                put = self._store.put(
                    {namespace.group: _hashes(request)[here].tolist()},
                    cache,
                    {namespace.group: ids[here]},
                )
                stored = await put
                await put.drained()
                kept = here & _landed(stored, namespace, ids)
                reasons += stored.missing.reasons
        self._written_bytes += outcome.nbytes
        results = np.where(kept, BlockResult.LANDED, BlockResult.FAILED).astype(
            np.uint8
        )
        return StoreDone.of(request.number, results, "; ".join(reasons))

    async def _get(self, request: Get) -> None:
        """Get blocks into a berth, say which there are, and push those."""
        namespace = request.namespace.namespace()
        refusal = self._refusal(request, namespace)
        if refusal:
            await self._send(_all(request, BlockResult.REFUSED, refusal))
            return
        async with self._berths.one() as berth:
            images = _images(berth, request, namespace)
            cache, ids = images.cache, images.ids
            hashes = {namespace.group: _hashes(request).tolist()}
            got = await self._store.get(hashes, cache, {namespace.group: ids})
            here = _landed(got, namespace, ids)
            results = np.full(ids.size, BlockResult.LANDED, np.uint8)
            results[~here] = _lost(got, namespace)
            reason = "; ".join(got.missing.reasons)
            await self._send(StoreDone.of(request.number, results, reason))
            if not here.any():
                return
            pushed = self._connection.push(
                request.transfer,
                cache,
                {namespace.group: ids[here]},
                deadline=_deadline(request),
            )
            pushed.ready()
            pushed.finish()
            outcome = await pushed
            await drain_or_abort(pushed, self._connection)
        self._read_bytes += outcome.nbytes

    async def _flush(self, request: Flush) -> StoreDone:
        text = ""
        if not self._server.read_only:
            try:
                await self._store.flush()
            except OSError as exc:
                text = str(exc) or type(exc).__name__
        return StoreDone(request.number, reason=text[:REASON_CHARS_MAX])

    def _refusal(self, request: TransferMessage, namespace: Namespace) -> str:
        """Return why blocks cannot move for a request; empty if they can."""
        if not request.names.all_in(namespace):
            return "a key is of another namespace than the request"
        nbytes = len(request.names) * namespace.image_bytes
        if nbytes > self._berths.nbytes:
            return (
                f"{len(request.names)} blocks of {namespace.image_bytes} bytes are "
                f"more than the {self._berths.nbytes} that one transfer may have here"
            )
        axes = ORDERS[request.order]
        piece = namespace.spec.item_bytes
        if axes[-1] == "dim":
            piece *= namespace.spec.head_dim
        if nbytes > STORE_PIECES_MAX * piece:
            return f"images in the order {', '.join(axes)} are in too many pieces"
        return ""

    def _write_refusal(self, namespace: Namespace) -> str:
        if self._server.read_only:
            return "this server is read-only"
        known = self._tiers.namespaces
        if namespace.digest not in known and len(known) >= STORE_NAMESPACES_MAX:
            return f"it has blocks of {STORE_NAMESPACES_MAX} kinds of caches already"
        return ""


def _images(berth: Bytes, request: TransferMessage, namespace: Namespace) -> ImageCache:
    """Return room in a berth for the images of a request."""
    room = images_in(berth, namespace.image_bytes, len(request.names))
    return ImageCache(namespace, request.order, room)


def _deadline(request: TransferMessage) -> timedelta:
    return timedelta(milliseconds=request.timeout_ms)


def _hashes(request: TransferMessage) -> Keys:
    """Return the hashes of a request's blocks."""
    return as_keys(key[DIGEST_BYTES:] for key in request.names.keys.tolist())


def _landed(outcome: Outcome, namespace: Namespace, ids: Ids) -> Bits:
    """Return which blocks landed, by their position in the list."""
    return among(ids, outcome.landed.ids(namespace.group))


def _lost(got: Outcome, namespace: Namespace) -> BlockResults:
    """Return what became of each block of a get that did not land."""
    absent = np.array([why.startswith(NOT_THERE) for why in got.missing.meanings])
    codes = got.missing.groups[namespace.group].codes
    return np.where(absent[codes], BlockResult.MISSING, BlockResult.FAILED).astype(
        np.uint8
    )


def _all(request: TransferMessage, result: BlockResult, reason: str) -> StoreDone:
    return StoreDone.of(
        request.number, np.full(len(request.names), result, np.uint8), reason
    )
