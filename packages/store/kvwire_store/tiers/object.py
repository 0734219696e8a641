"""A tier in an object store: ``object:s3://bucket/prefix``, one object for each block.

A block's name follows from its key, so nothing has to be listed, and no index is kept:
any number of stores share a prefix without coordination. See
docs/adr/20-store.md.

``find`` reads the head of each object that it does not remember. ``read`` fetches whole
objects, large ones in several ranges at once, and compares them with their checksums.
If an object is not the block that its name implies, it counts as missing, and the next
put of the block replaces it.

After a failure the store is left alone for a pause, which grows with each failure;
until then every call fails at once, with the reason.

No block and no credential is sent to another host than the one that the user named.
Before the first request, and after each failure, the tier checks whether the store
redirects to one. obstore would follow a redirect of a single object as well, with the
session token in a header, so such a request ends at a proxy that does not exist.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np

from kvwire.aio import Upkeep, gather_all
from kvwire.errors import UsageError, drop_frames
from kvwire.extras import needed_by
from kvwire.kv.blocks import Bits
from kvwire_store.address import TierAddress
from kvwire_store.keys import Key, Keys
from kvwire_store.limits import (
    STORE_OBJECT_PART_BYTES,
    STORE_OBJECT_PARTS,
    STORE_OBJECT_REQUESTS,
    STORE_OBJECT_REQUESTS_MAX,
    STORE_REDIAL_S,
    STORE_REDIAL_S_MAX,
    STORE_TIMEOUT_S,
)
from kvwire_store.tiers.base import FAILED, LANDED, Batch, BlockResult, BlockResults
from kvwire_store.tiers.object_answers import (
    NO_PROXY_AT,
    is_named,
    is_no_object,
    is_past_the_end,
    sent_elsewhere,
    words_of,
)
from kvwire_store.tiers.object_format import HEAD_BYTES, ObjectHead, packed
from kvwire_store.tiers.values import Head, KeyValueTier

T = TypeVar("T")

# Options of the tier; the others are obstore's.
_OWN: Final = frozenset({"timeout", "requests", "codec"})
_SCHEMES: Final = (
    "s3",
    "s3a",
    "gs",
    "az",
    "adl",
    "azure",
    "abfs",
    "abfss",
    "file",
    "memory",
)
# Options with these words would appear in every report and log that names the tier.
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
# Where AWS gives credentials to an instance, a container, a pod and a role.
_CREDENTIALS_AT: Final = (
    "169.254.169.254",
    "169.254.170.2",
    "169.254.170.23",
    "fd00:ec2::23",
    "fd00:ec2::254",
    "sts.amazonaws.com",
)
# Variables, and options of the address, with another such address.
_NAMED_AT: Final = (
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_ENDPOINT_URL_STS",
    "AWS_METADATA_ENDPOINT",
)
_NAMED_BY: Final = (
    "aws_endpoint_url_sts",
    "aws_metadata_endpoint",
    "endpoint_url_sts",
    "metadata_endpoint",
)
# The region of a role's credentials, if none is named.
_REGION: Final = "us-east-1"
_SECRETS: Final = ("secret", "key", "token", "password", "credential", "sas")


class ObjectTier(KeyValueTier):
    """Keeps blocks as objects. Made by :meth:`open`.

    Its address is ``object:URL?requests=N&timeout=SECONDS``. The URL is
    ``s3://bucket/prefix``, ``gs://...``, ``az://...``, ``file:///directory`` or
    ``memory:///``. Other options go to obstore, such as ``region`` and ``endpoint``.
    Credentials come from the environment.

    Attributes:
        library: The module obstore, which makes every request.
    """

    timeout_s: ClassVar[float] = STORE_TIMEOUT_S
    separator: ClassVar[str] = ""
    remembers: ClassVar[bool] = True
    # Larger objects are written and read in parts of so many bytes.
    part_bytes: int = STORE_OBJECT_PART_BYTES

    def __init__(self, address: TierAddress) -> None:
        super().__init__(address)
        self.durable = not address.place.startswith("memory:")
        requests = address.number(
            "requests", STORE_OBJECT_REQUESTS, STORE_OBJECT_REQUESTS_MAX
        )
        self._requests = max(1, int(requests))
        self._room = asyncio.Semaphore(self._requests)
        self._bucket = bucket_of(address, self._timeout_s)
        # The endpoint to test for redirects; empty once it was tested.
        self._unproved = self._url = url_of(address)
        self._proving = asyncio.Lock()
        import obstore  # noqa: PLC0415 - an extra

        self.library: Any = obstore
        self._upkeep = Upkeep(STORE_REDIAL_S, STORE_REDIAL_S_MAX)
        # For writes only: a store that refuses them may still be readable.
        self._writes = Upkeep(STORE_REDIAL_S, STORE_REDIAL_S_MAX)
        # Whether one of the two has failed; checked before each request.
        self._away = False

    @property
    def taking(self) -> bool:
        """Whether it accepts blocks; after a failure it pauses for a while."""
        return not (self._upkeep.resting or self._writes.resting)

    # --- values -----------------------------------------------------------------------

    async def heads(self, keys: Keys) -> list[Head]:
        """Read the heads, each with a separate request."""
        heads: list[Head] = [BlockResult.FAILED] * keys.size

        async def look(at: int) -> None:
            heads[at] = await self._range(keys[at], 0, HEAD_BYTES)

        if not self._upkeep.resting:
            await self._each(look, range(keys.size))
        return heads

    async def put(self, batch: Batch) -> BlockResults:
        results = np.full(batch.keys.size, FAILED, np.uint8)
        objects = await self._threads.run(partial(packed, batch))

        async def put(at: int) -> None:
            key = batch.keys[at]
            data = objects[at].data
            in_parts = data.nbytes > self.part_bytes
            # obstore limits the time of each request, and removes the parts of a failed
            # upload. If this time limit cuts an upload short, its parts remain and cost
            # money. So it is long enough for all but a stuck one: a begin, rounds of
            # parts, an end and an abort.
            rounds = math.ceil(data.nbytes / (self.part_bytes * STORE_OBJECT_PARTS))
            limit_s = self._timeout_s * (2 * (rounds + 3) if in_parts else 1)
            done = await self._ask(
                lambda: self.library.put_async(
                    self._bucket,
                    self.value_name(key),
                    data,
                    use_multipart=in_parts,
                    chunk_size=self.part_bytes,
                    max_concurrency=STORE_OBJECT_PARTS,
                ),
                limit_s,
                writes=True,
            )
            if not isinstance(done, BlockResult):
                results[at] = LANDED

        # The head of a chain first: without it, the tail is worthless.
        await self._each(put, range(batch.keys.size))
        return results

    async def get_into(self, batch: Batch) -> BlockResults:
        results = np.full(batch.keys.size, FAILED, np.uint8)
        raws: dict[int, memoryview] = {}
        nbytes = HEAD_BYTES + int(batch.images.lengths[0])

        async def get(at: int) -> None:
            raw = await self._whole(batch.keys[at], nbytes)
            if isinstance(raw, BlockResult):
                results[at] = raw
            else:
                raws[at] = raw

        await self._each(get, range(batch.keys.size))
        which = np.fromiter(raws, np.int64, len(raws))
        await self.unpack(batch, which, list(raws.values()), results)
        return results

    async def remove(self, keys: Keys) -> Bits:
        failed = await self._delete(map(self.value_name, keys.tolist()))
        return ~np.isin(np.arange(keys.size), failed)

    async def remove_folder(self, folder: str) -> None:
        pages = self.library.list(self._bucket, folder)

        async def next_page() -> Any:
            async for one in pages:
                return one
            return ()

        while page := await self._ask(next_page):
            if isinstance(page, BlockResult):
                raise OSError(
                    f"{self.name}: some objects were not deleted: {self.error}"
                )
            paths = [meta["path"] for meta in page]
            delete = partial(self.library.delete_async, self._bucket, paths)
            if await self._ask(delete) is None:
                continue
            # One of them was already gone, so obstore stopped before the later ones.
            if left := len(await self._delete(paths)):
                raise OSError(
                    f"{self.name}: could not delete {left} objects: {self.error}"
                )

    async def _delete(self, paths: Iterable[str]) -> list[int]:
        """Delete some paths; return the positions of those that may still exist."""
        failed: list[int] = []

        async def one(numbered: tuple[int, str]) -> None:
            at, path = numbered
            delete = partial(self.library.delete_async, self._bucket, path)
            if await self._ask(delete) is BlockResult.FAILED:
                failed.append(at)

        await self._each(one, enumerate(paths))
        return failed

    # --- requests ---------------------------------------------------------------------

    async def _whole(self, key: Key, nbytes: int) -> memoryview | BlockResult:
        """Fetch an object of up to ``nbytes``.

        The first range shows the length; all further ranges are then fetched at once.
        If the block is put again meanwhile in another form, the checksum shows it.
        """
        part = self.part_bytes
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
        """Fetch up to ``nbytes`` of an object, starting at ``begin``."""
        path = self.value_name(key)

        async def fetch() -> Any:
            ask = self.library.get_range_async
            try:
                return await ask(self._bucket, path, start=begin, length=nbytes)
            except self.library.exceptions.GenericError as exc:
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
        """Make one request; an error becomes MISSING (no such object) or FAILED."""
        async with self._room:
            if self._away and self._resting(writes):
                return BlockResult.FAILED
            try:
                async with asyncio.timeout(limit_s or self._timeout_s):
                    if self._unproved:
                        await self._prove()
                    found = await call()
            # Not all of obstore's exceptions are subclasses of Exception.
            except BaseException as exc:
                known = isinstance(exc, OSError | self.library.exceptions.BaseError)
                if not known and not _is_panic(exc):
                    raise
                # A thread of obstore may still hold the exception when the store is
                # closed.
                drop_frames(exc)
                if not writes and is_no_object(exc):
                    return BlockResult.MISSING
                self._became_unavailable(exc, writes=writes)
                return BlockResult.FAILED
        if self._away or self._error:
            self._came_back(writes)
        return found

    async def _prove(self) -> None:
        """Check that the endpoint does not redirect to another host."""
        async with self._proving:
            if self._unproved:
                look = partial(sent_elsewhere, self._unproved, self._timeout_s)
                if where := await self._threads.run(look):
                    raise OSError(
                        f"it redirects to {where}, and kvwire sends blocks only to "
                        "the host that you named; if you trust that host, write "
                        f"?endpoint={where}"
                    )
                self._unproved = ""

    async def _each(
        self, work: Callable[[Any], Awaitable[None]], positions: Iterable[Any]
    ) -> None:
        """Process each position, with up to the allowed number of requests."""
        left = iter(positions)

        async def lane() -> None:
            for position in left:
                await work(position)

        await gather_all(*(lane() for _ in range(self._requests)))

    def _resting(self, writes: bool) -> bool:
        return self._upkeep.resting or (writes and self._writes.resting)

    def _came_back(self, writes: bool) -> None:
        if self._resting(writes):
            return  # an answer to a request from before a failure
        self._upkeep.back()
        if writes:
            self._writes.back()
        if not self._writes.reason:
            self.error = ""
        self._away = bool(self._writes.reason)

    def _became_unavailable(self, error: BaseException, *, writes: bool) -> None:
        """Record a failed request, and pause further requests of its kind."""
        words = words_of(error) or f"no answer in {self._timeout_s:g} s"
        # A reason from the store is not replaced by an error without one.
        if is_named(error) or not self.error:
            self.error = words
        self._unproved = self._url
        if not self._resting(writes):
            (self._writes if writes else self._upkeep).lost(self.error)
            self._away = True


def bucket_of(address: TierAddress, timeout_s: float) -> Any:
    """Return obstore's bucket for the address of a tier."""
    with needed_by(
        "a tier in an object store", extra="objects", distribution="kvwire-store"
    ):
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra
        from obstore.store import from_url  # noqa: PLC0415
    settings = _settings(address)
    for name in settings:
        if any(word in name.lower() for word in _SECRETS):
            raise UsageError(
                f"tier: {name}= would appear in logs and metrics; pass credentials in "
                "the environment"
            )
    scheme = address.place.partition(":")[0].lower()
    if scheme not in _SCHEMES:
        raise UsageError(
            f"tier {address.text!r}: {scheme or 'nothing'} is not a supported object "
            f"store; choose one of {', '.join(_SCHEMES)}"
        )
    endpoint = _endpoint(settings)
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise UsageError(
            f"tier {address.text!r}: endpoint {endpoint} is not an HTTP address; "
            f"write http://{endpoint.rpartition('//')[2]}, or https:// for TLS"
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
                # An http:// endpoint was chosen on purpose: a private server without
                # TLS.
                "allow_http": endpoint.startswith("http://"),
                **_only_to(url_of(address), settings),
            },
            # It ends before the tier's own time limit, so its error contains the last
            # answer.
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
        # obstore panics if it gets an option that belongs to another part of it.
        if not isinstance(exc, BaseError | ValueError) and not _is_panic(exc):
            raise
        text = str(exc).partition("\n")[0]
        raise UsageError(f"tier {address.text!r}: {text}") from None


def url_of(address: TierAddress) -> str:
    """Return the URL of a bucket on the user's own server; "" for other stores.

    Amazon, Google and Microsoft do not redirect uploads to another host.
    """
    where = urlsplit(address.place)
    endpoint = _endpoint(_settings(address))
    if where.scheme not in ("s3", "s3a") or not endpoint:
        return ""
    return f"{endpoint.rstrip('/')}/{where.netloc}/"


def _only_to(url: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the options with which obstore reaches one host and no other.

    obstore cannot be kept from following redirects. A proxy can, for all hosts but the
    user's own server and those that give credentials. There can be only one proxy, so
    a proxy that the environment names for this server is used instead.
    """
    where = urlsplit(url)
    host = where.hostname or ""
    proxies = getproxies()
    named = proxies.get(where.scheme) or proxies.get("all")
    if not host or (named and not proxy_bypass(host)):
        return {}
    given = {name.lower(): value for name, value in settings.items()}
    regions = [given.get(name, "") for name in ("aws_region", "region")]
    regions += [os.environ.get(name, "") for name in _REGIONS]
    regions = [one or _REGION for one in regions]
    hosts = {host, *_CREDENTIALS_AT, *(f"sts.{one}.amazonaws.com" for one in regions)}
    named_at = [os.environ.get(name, "") for name in _NAMED_AT]
    named_at += [given.get(name, "") for name in _NAMED_BY]
    hosts |= {urlsplit(one).hostname or "" for one in named_at}
    return {
        "proxy_url": f"http://{NO_PROXY_AT}",
        "proxy_excludes": ",".join(sorted(filter(None, hosts))),
    }


def _settings(address: TierAddress) -> dict[str, str]:
    return {k: v for k, v in address.options.items() if k not in _OWN}


def _endpoint(settings: Mapping[str, str]) -> str:
    """Return the endpoint from the address, or from the environment."""
    names = ("aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint")
    given = {name.lower(): value for name, value in settings.items()}
    named = [given[name] for name in names if name in given]
    named += [os.environ.get(name.upper(), "") for name in names[:2]]
    return next(filter(None, named), "")


def _is_panic(error: BaseException) -> bool:
    # The panics of obstore itself, and those of its threads.
    return type(error).__name__ in ("PanicException", "RustPanic")
