"""A tier in an object store: ``object:s3://bucket/prefix``, one object for each block.

A block's name follows from its key, so nothing has to be listed, and no index is kept:
any number of stores share a prefix without knowing of each other. See
docs/adr/0014-a-store-server-and-objects.md.

``find`` reads the head of each object that it does not remember; ``read`` fetches whole
objects, large ones by several ranges at once, and compares them with their checksums.
What is not what its name says is missing, and is written again by the next put of it.

A store that cannot be reached is not asked again until a pause is over, which grows
with each failure. Meanwhile everything is answered at once, with the reason. Before it
is asked for the first time, and after each failure, somebody looks whether it sends its
callers to another host: there no block goes.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import numpy as np

from kvwire.aio import Backoff, gather_all
from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.store.address import TierAddress
from kvwire.store.index import Key, Keys, Orders
from kvwire.store.limits import (
    STORE_OBJECT_ABSENT_S,
    STORE_OBJECT_PART_BYTES,
    STORE_OBJECT_PARTS,
    STORE_OBJECT_REQUESTS,
    STORE_OBJECT_REQUESTS_MAX,
    STORE_OBJECTS_KNOWN,
    STORE_REDIAL_S,
    STORE_REDIAL_S_MAX,
    STORE_TIMEOUT_S,
    STORE_TIMEOUT_S_MAX,
)
from kvwire.store.namespace import ABSENT, Namespace
from kvwire.store.tiers.base import Batch, BlockResult, BlockResults
from kvwire.store.tiers.coded import CodedTier
from kvwire.store.tiers.object_answers import (
    is_named,
    is_no_object,
    is_past_the_end,
    sent_elsewhere,
    words_of,
)
from kvwire.store.tiers.object_format import (
    HEAD_BYTES,
    ObjectHead,
    packed,
    path_of,
    unpacked,
)

T = TypeVar("T")

# Options of the tier; the others are obstore's.
_OWN: Final = frozenset({"timeout", "requests", "codec"})
_SCHEMES: Final = (
    *("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file", "memory"),
)
# They would be in every report and log that names the tier.
_SECRETS: Final = ("secret", "key", "token", "password", "credential", "sas")


class ObjectTier(CodedTier):
    """Keeps blocks as objects. Made by :meth:`open`."""

    def __init__(self, address: TierAddress) -> None:
        super().__init__(address)
        self.durable = not address.place.startswith("memory:")
        requests = address.number(
            "requests", STORE_OBJECT_REQUESTS, STORE_OBJECT_REQUESTS_MAX
        )
        self._requests = max(1, int(requests))
        self._room = asyncio.Semaphore(self._requests)
        self._timeout_s = address.number(
            "timeout", STORE_TIMEOUT_S, STORE_TIMEOUT_S_MAX
        )
        self._bucket = bucket_of(address, self._timeout_s)
        # The endpoint to test for redirects; empty once it was tested.
        self._unproved = self._url = url_of(address)
        self._proving = asyncio.Lock()
        # Whether the last failure was a write; a successful read does not end it.
        self._write_failed = False
        import obstore  # noqa: PLC0415 - an extra

        self._obstore = obstore
        self._backoff = Backoff(STORE_REDIAL_S, STORE_REDIAL_S_MAX)
        self._unavailable_until = 0.0
        # Until when writes pause; a store that refuses writes may still be read.
        self._untaking_until = 0.0
        # The orders of blocks that are there, the ones found last at the end.
        self._present: OrderedDict[Key, int] = OrderedDict()
        # Until when blocks are taken to be absent; damaged ones until they are written.
        self._absent: OrderedDict[Key, float] = OrderedDict()

    @classmethod
    async def open(cls, address: TierAddress) -> ObjectTier:
        """Open a tier: ``object:URL?requests=N&timeout=SECONDS``.

        The URL is ``s3://bucket/prefix``, ``gs://...``, ``az://...``,
        ``file:///directory`` or ``memory:///``. Other options go to obstore, such as
        ``region`` and ``endpoint``. Credentials come from the environment.

        Cancel safety: safe, nothing is opened yet.
        """
        return cls(address)

    @property
    def taking(self) -> bool:
        """Tell whether it takes blocks: it was not unavailable a moment ago."""
        return not self._resting(writes=True)

    async def find(self, keys: Keys) -> Orders:
        """Return the order of each block's image, or ``ABSENT``.

        What is not remembered is a request each, for the head of the object.
        """
        known = map(self._present.get, keys.tolist(), repeat(ABSENT))
        orders = np.fromiter(known, np.uint8, keys.size)
        if self._resting():
            return orders
        now = asyncio.get_running_loop().time()
        unknown = np.flatnonzero(orders == ABSENT).tolist()
        asked = [at for at in unknown if self._absent.get(keys[at], 0.0) <= now]

        async def look(at: int) -> None:
            orders[at] = await self._look(keys[at])

        await self._each(look, asked)
        return orders

    async def delete(self, keys: Keys) -> None:
        """Delete the objects of blocks."""
        try:
            await self._delete(map(path_of, keys.tolist()))
        finally:  # what has failed may have been done
            for key in keys.tolist():
                self._lacks(key, STORE_OBJECT_ABSENT_S)

    async def delete_namespace(self, digest: bytes) -> None:
        """Delete every object of a namespace."""
        pages = self._obstore.list(self._bucket, f"{digest.hex()}/")

        async def next_page() -> Any:
            async for one in pages:
                return one
            return ()

        try:
            while page := await self._ask(next_page):
                if isinstance(page, BlockResult):
                    raise OSError(f"{self.name}: not all deleted: {self.error}")
                paths = [meta["path"] for meta in page]
                delete = partial(self._obstore.delete_async, self._bucket, paths)
                if await self._ask(delete) is not None:
                    # One was gone by then, and what came behind it is there still.
                    await self._delete(paths)
        finally:
            for key in [key for key in self._present if key.startswith(digest)]:
                self._lacks(key, STORE_OBJECT_ABSENT_S)

    async def close(self) -> None:
        self._threads.close()

    # --- blocks -----------------------------------------------------------------------

    async def _look(self, key: Key) -> int:
        """Return the order of one block's image, or ``ABSENT``."""
        known = self._known(key)
        raw = await self._range(key, 0, HEAD_BYTES)
        if self._known(key) != known:
            # It was written or deleted meanwhile, so this may be of before.
            return self._present.get(key, ABSENT)
        if isinstance(raw, BlockResult):
            if raw is BlockResult.MISSING:
                self._lacks(key, STORE_OBJECT_ABSENT_S)
            return ABSENT
        head = ObjectHead.read(raw)
        if head is None or head.key != key:
            self._lacks(key, STORE_OBJECT_ABSENT_S)
            return ABSENT
        self._has(key, head.order)
        return head.order

    async def _write_entries(self, namespace: Namespace, batch: Batch) -> BlockResults:
        results = np.full(batch.keys.size, BlockResult.FAILED, np.uint8)
        objects = await self._threads.run(partial(packed, batch))

        async def put(at: int) -> None:
            key, data = batch.keys[at], objects[at].data
            in_parts = data.nbytes > STORE_OBJECT_PART_BYTES
            # obstore bounds each request, and takes back the parts of an upload that
            # fails. Those of one that is cut short from here stay, and cost money: only
            # what hangs may be, after a beginning, rounds of parts, end and abort.
            rounds = math.ceil(
                data.nbytes / (STORE_OBJECT_PART_BYTES * STORE_OBJECT_PARTS)
            )
            limit_s = self._timeout_s * (2 * (rounds + 3) if in_parts else 1)
            done = await self._ask(
                lambda: self._obstore.put_async(
                    self._bucket,
                    path_of(key),
                    data,
                    use_multipart=in_parts,
                    chunk_size=STORE_OBJECT_PART_BYTES,
                    max_concurrency=STORE_OBJECT_PARTS,
                ),
                limit_s,
                writes=True,
            )
            if not isinstance(done, BlockResult):
                results[at] = BlockResult.LANDED
                self._has(key, int(batch.orders[at]))

        # The head of a chain first: without it the tail is worth nothing.
        await self._each(put, range(batch.keys.size))
        return results

    async def _read_entries(self, namespace: Namespace, batch: Batch) -> BlockResults:
        results = np.full(batch.keys.size, BlockResult.FAILED, np.uint8)
        raws: list[memoryview] = [memoryview(b"")] * batch.keys.size
        known = list(map(self._known, batch.keys.tolist()))

        async def get(at: int) -> None:
            raw = await self._whole(batch.keys[at], HEAD_BYTES + namespace.image_bytes)
            if isinstance(raw, BlockResult):
                results[at] = raw
            else:
                raws[at], results[at] = raw, BlockResult.LANDED

        await self._each(get, range(batch.keys.size))
        came = np.flatnonzero(results == BlockResult.LANDED)
        if came.size:
            part = batch.selected(came)
            job = partial(unpacked, part, [raws[at] for at in came])
            results[came] = await self._threads.run(job)
            batch.tell(came, part)
        columns = batch.keys.tolist(), results.tolist(), known
        for key, result, before in zip(*columns, strict=True):
            if self._known(key) != before:
                continue
            if result == BlockResult.DAMAGED:
                self._lacks(key, math.inf)
            elif result == BlockResult.MISSING:
                self._lacks(key, STORE_OBJECT_ABSENT_S)
        return results

    async def _delete(self, paths: Iterable[str]) -> None:
        """Delete what each path names; what is not there is deleted already."""
        failed: list[str] = []

        async def one(path: Any) -> None:
            delete = partial(self._obstore.delete_async, self._bucket, path)
            if await self._ask(delete) is BlockResult.FAILED:
                failed.append(path)

        await self._each(one, paths)
        if failed:
            raise OSError(f"{self.name}: {len(failed)} not deleted: {self.error}")

    # --- requests ---------------------------------------------------------------------

    async def _whole(self, key: Key, nbytes: int) -> memoryview | BlockResult:
        """Fetch an object of up to so many bytes.

        The first range says how long it is; what is behind that comes at once. Who
        puts it again meanwhile, by another codec, makes it one with a wrong checksum.
        """
        part = STORE_OBJECT_PART_BYTES
        first = await self._range(key, 0, min(nbytes, part))
        if isinstance(first, BlockResult) or first.nbytes < part:
            return first
        head = ObjectHead.read(first)
        end = min(nbytes, HEAD_BYTES + head.nbytes) if head else 0
        begins = range(part, end, part)
        if not begins:
            return first
        rest = await gather_all(
            *(self._range(key, at, min(part, end - at)) for at in begins)
        )
        ranges = [first]
        for one in rest:
            if isinstance(one, BlockResult):
                return one
            ranges.append(one)
        arrays = [np.frombuffer(one, np.uint8) for one in ranges]
        joined = await self._threads.run(partial(np.concatenate, arrays))
        return joined.data

    async def _range(
        self, key: Key, begin: int, nbytes: int
    ) -> memoryview | BlockResult:
        """Fetch up to so many bytes of an object."""
        path = path_of(key)

        async def fetch() -> Any:
            ask = self._obstore.get_range_async
            try:
                return await ask(self._bucket, path, start=begin, length=nbytes)
            except self._obstore.exceptions.GenericError as exc:
                if is_past_the_end(exc):
                    return b""
                raise

        found = await self._ask(fetch)
        return found if isinstance(found, BlockResult) else memoryview(found)

    async def _ask(
        self,
        call: Callable[[], Awaitable[T]],
        limit_s: float | None = None,
        *,
        writes: bool = False,
    ) -> T | BlockResult:
        """Make one request; MISSING if there is no such object, FAILED otherwise."""
        async with self._room:
            if self._resting(writes=writes):
                return BlockResult.FAILED
            try:
                async with asyncio.timeout(limit_s or self._timeout_s):
                    if self._unproved:
                        await self._prove()
                    found = await call()
            except BaseException as exc:  # of what obstore raises one kind is no less
                if not writes and is_no_object(exc):
                    return BlockResult.MISSING
                known = isinstance(exc, OSError | self._obstore.exceptions.BaseError)
                if not known and not _is_panic(exc):
                    raise
                self._became_unavailable(exc, writes=writes)
                return BlockResult.FAILED
        if not self._resting():  # it may be an answer from before a failure
            self.unavailable_reason = ""
            if writes or not self._write_failed:
                self._backoff.reset()
                self.error, self._write_failed = "", False
        return found

    async def _prove(self) -> None:
        """Check that the endpoint does not redirect to another host."""
        async with self._proving:
            if self._unproved:
                look = partial(sent_elsewhere, self._unproved, self._timeout_s)
                if where := await self._threads.run(look):
                    raise OSError(
                        f"it sends its callers to {where}, and no block goes to "
                        f"another host than was named; give ?endpoint={where}"
                    )
                self._unproved = ""

    async def _each(
        self, work: Callable[[Any], Awaitable[None]], positions: Iterable[Any]
    ) -> None:
        """Work on each position, some at a time; a task for each lane and not more."""
        left = iter(positions)

        async def lane() -> None:
            for position in left:
                await work(position)

        await gather_all(*(lane() for _ in range(self._requests)))

    def _resting(self, *, writes: bool = False) -> bool:
        until = self._unavailable_until
        if writes:
            until = max(until, self._untaking_until)
        return asyncio.get_running_loop().time() < until

    def _became_unavailable(self, error: BaseException, *, writes: bool) -> None:
        """Report a failed request, and make no others of its kind for a while."""
        words = words_of(error) or f"no answer in {self._timeout_s:g} s"
        # A reason that the store named is not replaced by a nameless one.
        if is_named(error) or not self.error:
            self.error = words
        self._unproved = self._url
        if self._resting(writes=writes):
            return
        until = asyncio.get_running_loop().time() + self._backoff.pause_s()
        if writes:
            self._write_failed, self._untaking_until = True, until
        else:
            self.unavailable_reason, self._unavailable_until = self.error, until

    # --- what is remembered -----------------------------------------------------------

    def _known(self, key: Key) -> tuple[int | None, float | None]:
        """Return what is remembered of a block: not the same after any change of it."""
        return self._present.get(key), self._absent.get(key)

    def _has(self, key: Key, order: int) -> None:
        self._absent.pop(key, None)
        self._present[key] = order
        self._present.move_to_end(key)
        if len(self._present) > STORE_OBJECTS_KNOWN:
            self._present.popitem(last=False)

    def _lacks(self, key: Key, for_s: float) -> None:
        self._present.pop(key, None)
        now = asyncio.get_running_loop().time()
        self._absent[key] = now + for_s
        self._absent.move_to_end(key)
        if len(self._absent) > STORE_OBJECTS_KNOWN:
            self._absent.popitem(last=False)


def bucket_of(address: TierAddress, timeout_s: float) -> Any:
    """Return where the objects of a tier are."""
    with needed_by("a tier in an object store", extra="store"):
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra
        from obstore.store import from_url  # noqa: PLC0415
    settings = _settings(address)
    for name in settings:
        if any(word in name.lower() for word in _SECRETS):
            raise UsageError(
                f"tier: {name}= would be shown wherever the tier is named; pass "
                f"credentials in the environment"
            )
    scheme = address.place.partition(":")[0].lower()
    if scheme not in _SCHEMES:
        raise UsageError(
            f"tier {address.text!r}: {scheme or 'nothing'} is no object store that is "
            f"supported; there are {', '.join(_SCHEMES)}"
        )
    endpoint = _endpoint(settings)
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise UsageError(
            f"tier {address.text!r}: endpoint {endpoint} is not of HTTP; write "
            f"http://{endpoint.rpartition('//')[2]}, or https:// for TLS"
        )
    if address.place.startswith("file:") and not address.place.startswith("file:///"):
        raise UsageError(f"tier {address.text!r}: write object:file:///DIRECTORY")
    try:
        if address.place.startswith("memory:"):
            return from_url("memory:///")
        if address.place.startswith("file:"):
            return from_url(address.place, mkdir=True)
        return from_url(
            address.place,
            config=settings,
            client_options={
                "timeout": timedelta(seconds=timeout_s),
                # Who writes http:// means it: a server of one's own, without TLS.
                "allow_http": endpoint.startswith("http://"),
            },
            # It ends before the tier gives up, so its error has the last answer.
            retry_config={
                "retry_timeout": timedelta(seconds=0.7 * timeout_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=min(0.1, timeout_s / 16)),
                    "max_backoff": timedelta(seconds=timeout_s / 8),
                    "base": 2,
                },
            },
        )
    except BaseException as exc:
        # obstore panics at options that it knows for another part of itself.
        if not isinstance(exc, BaseError | ValueError) and not _is_panic(exc):
            raise
        text = str(exc).partition("\n")[0]
        raise UsageError(f"tier {address.text!r}: {text}") from None


def url_of(address: TierAddress) -> str:
    """Return the URL of a bucket on the user's own server; "" for other stores.

    Amazon, Google and Microsoft do not redirect uploads to another host.
    """
    where, endpoint = urlsplit(address.place), _endpoint(_settings(address))
    if where.scheme not in ("s3", "s3a") or not endpoint:
        return ""
    return f"{endpoint.rstrip('/')}/{where.netloc}/"


def _settings(address: TierAddress) -> dict[str, str]:
    return {k: v for k, v in address.options.items() if k not in _OWN}


def _endpoint(settings: Mapping[str, str]) -> str:
    """Return the endpoint that is named in the address, or in the environment."""
    names = ("aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint")
    given = {name.lower(): value for name, value in settings.items()}
    named = [given[name] for name in names if name in given]
    named += [os.environ.get(name.upper(), "") for name in names[:2]]
    return next(filter(None, named), "")


def _is_panic(error: BaseException) -> bool:
    # Of obstore itself, and of what it runs in its own threads.
    return type(error).__name__ in ("PanicException", "RustPanic")
