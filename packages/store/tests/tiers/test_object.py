"""Blocks as objects: found again, checked, never in the way, and what is wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import inside

pytest.importorskip("obstore", reason="needs obstore: pip install obstore")

import obstore.store
from aiohttp import web
from obstore.exceptions import BaseError

from kvwire import BackendUnavailable, UsageError
from kvwire.aio import Upkeep
from kvwire.extras import install_command
from kvwire.limits import REASON_CHARS_MAX
from kvwire_store import BlockStore
from kvwire_store.address import TierAddress
from kvwire_store.keys import as_keys
from kvwire_store.tiers.object import ObjectTier, bucket_of
from kvwire_store.tiers.object_answers import is_no_object, words_of
from kvwire_store.tiers.object_format import HEAD_BYTES, path_of
from packages.store.tests.contract import (
    NAMESPACE,
    put_before,
    tier_of,
)
from tests.support.caches import STORED as SPEC
from tests.support.caches import Filled, chain
from tests.support.logs import warned
from tests.support.pairs import turns, until

# Its threads start with the first request of a process, and stay.
obstore.put(obstore.store.MemoryStore(), "first", b"")


def objects_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_what_is_deleted_has_no_object(tmp_path: Path) -> None:
    tier, cache = f"object:file://{tmp_path}", Filled(seed=1).cache
    async with BlockStore.open([tier], tenants=["t"]) as store:
        for tenant in ("", "t"):
            await store.put(chain(8), cache, range(8), tenant=tenant)
        await store.delete(chain(9), cache)
        assert await store.match(chain(8), cache) == 0
        assert len(objects_in(tmp_path)) == 8
        await store.delete_all(tenant="t")
        assert not objects_in(tmp_path)
        folder = tmp_path / NAMESPACE.digest.hex()
        (folder / chain(1)[0].hex() / "in the way").mkdir(parents=True)
        with pytest.raises(OSError, match="could not delete 1 "):
            await store.delete(chain(1), cache)


async def test_what_a_delete_may_have_deleted_is_written_by_the_next_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its requests has failed, and the other has not."""
    tiers, cache = [f"object:file://{tmp_path}"], Filled(seed=1).cache
    async with BlockStore.open(tiers) as store:
        assert (await store.put(chain(2), cache, range(2))).complete
        path = file_of(tmp_path, chain(2)[0])
        path.unlink()
        (path / "in the way").mkdir(parents=True)
        with pytest.raises(OSError, match="could not delete 1 "):
            await store.delete(chain(2), cache)
        (path / "in the way").rmdir()
        path.rmdir()
        end_pauses(monkeypatch)
        assert (await store.put(chain(2), cache, range(2))).complete
    assert len(objects_in(tmp_path)) == 2


async def test_two_who_delete_a_namespace_leave_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some paths that are deleted at once, one is there no more: the others are."""
    cache, delete, calls = Filled(64, seed=1).cache, obstore.delete_async, 0

    async def beside_another(bucket: Any, paths: list[str]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await delete(bucket, paths[0])
        await delete(bucket, paths)

    async with BlockStore.open([f"object:file://{tmp_path}"]) as store:
        assert (await store.put(chain(64), cache, range(64))).complete
        monkeypatch.setattr(obstore, "delete_async", beside_another)
        await store.delete_all()
    assert not objects_in(tmp_path)


async def test_a_cancelled_delete_does_not_delete_what_is_put_after_it(
    tmp_path: Path,
) -> None:
    cache = Filled(seed=1).cache
    async with BlockStore.open([f"object:file://{tmp_path}"]) as store:
        requests, go = Requests(tier_of(store, ObjectTier)), asyncio.Event()
        assert (await store.put(chain(1), cache, [0])).complete

        async def wait(name: str) -> None:
            if name == "delete_async":
                await go.wait()

        requests.before = wait
        deleting = asyncio.create_task(store.delete(chain(1), cache))
        await until(lambda: "delete_async" in requests.made)
        deleting.cancel()
        await turns(10)
        assert not deleting.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await deleting
        assert (await store.put(chain(1), cache, [0])).complete
    assert len(objects_in(tmp_path)) == 1


def file_of(folder: Path, one: bytes) -> Path:
    return folder / path_of(NAMESPACE.digest + one)


class Requests:
    """Counts what an object tier asks for; ``before`` may fail or wait.

    It has the calls that the tier may make, and none that lists.
    """

    exceptions = obstore.exceptions

    def __init__(self, tier: ObjectTier) -> None:
        self.made: list[str] = []
        self.open = self.most = 0
        self.before: Callable[[str], Awaitable[None]] | None = None
        tier.library = self

    async def _call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        self.made.append(name)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if self.before is not None:
                await self.before(name)
            return await getattr(obstore, name)(*arguments, **keywords)
        finally:
            self.open -= 1

    def __getattr__(self, name: str) -> Any:
        if name not in ("get_range_async", "put_async", "head_async", "delete_async"):
            raise AttributeError(name)
        return partial(self._call, name)


# --- blocks ---------------------------------------------------------------------------


async def test_in_memory() -> None:
    source, target, hashes = Filled(40, seed=1), Filled(40), chain(40)
    async with BlockStore.open(["memory:64KiB", "object:memory:///"]) as store:
        assert not tier_of(store, ObjectTier).durable
        assert (await store.put(hashes, source.cache, range(40))).complete
        assert len(inside.tiers(store).memory.index) < 40
        assert (await store.get(hashes, target.cache, range(40))).complete
    assert np.array_equal(
        source.tokens(list(range(40))), target.tokens(list(range(40)))
    )


# --- requests -------------------------------------------------------------------------


async def test_a_large_object_is_read_by_ranges_at_once(
    tmp_path: Path,
) -> None:
    """One that ends before it should is missing, and no failure of the store."""
    source, hashes = await put_before(f"object:file://{tmp_path}", count=4)
    target = Filled()
    part = (HEAD_BYTES + SPEC.block_bytes) // 4
    for one, nbytes in zip(hashes[1:], (part, 2 * part, 3 * part - 1), strict=True):
        os.truncate(file_of(tmp_path, one), nbytes)
    async with BlockStore.open([f"object:file://{tmp_path}"]) as store:
        tier_of(store, ObjectTier).part_bytes = part
        requests = Requests(tier_of(store, ObjectTier))
        got = await store.get(hashes[:1], target.cache, [0])
        # The head for `find`, then four parts, all but the first at once.
        assert got.complete
        assert requests.made == ["get_range_async"] * 5
        assert requests.most == 3
        got = await store.get(hashes, target.cache, range(4))
        assert got.landed.ids().tolist() == [0]
        assert tier_of(store, ObjectTier).taking
    assert np.array_equal(source.tokens([0]), target.tokens([0]))


async def test_as_many_requests_as_allowed_at_once(tmp_path: Path) -> None:
    source, hashes = Filled(seed=1), chain(16)
    async with BlockStore.open([f"object:file://{tmp_path}?requests=3"]) as store:
        requests = Requests(tier_of(store, ObjectTier))
        halves = (
            store.put(hashes[:8], source.cache, range(8)),
            store.put(hashes[8:], source.cache, range(8, 16)),
        )
        assert all([(await half).complete for half in halves])
        assert requests.most == 3


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails is left alone until the test says otherwise."""
    monkeypatch.setattr(Upkeep, "pause_s", lambda _: 1e6)


def end_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upkeep, "resting", False)


@pytest.mark.usefixtures("long_pauses")
async def test_a_store_that_fails_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, hashes = Filled(seed=1), Filled(), chain(8)
    name = f"object:file://{tmp_path}?requests=2"
    async with BlockStore.open([name]) as store:
        tier = tier_of(store, ObjectTier)
        requests = Requests(tier)

        async def fail(_: str) -> None:
            await asyncio.sleep(0)
            raise obstore.exceptions.GenericError("no route to it\nand more")

        requests.before = fail
        put = await store.put(hashes, source.cache, range(8))
        assert set(put.missing.reasons) == {
            f"it is in memory only: {name}: no route to it"
        }
        # Those that were under way, and none after them.
        assert len(requests.made) == 2
        assert not tier.taking
        await inside.tiers(store).memory.empty()
        got = await store.get(hashes, target.cache, range(8))
        assert "no route to it" in got.missing["kv", 0]
        assert len(requests.made) == 2
        requests.before = None
        end_pauses(monkeypatch)
        assert (await store.put(hashes, source.cache, range(8))).complete
        assert not tier.reason


@pytest.mark.usefixtures("long_pauses")
async def test_what_takes_no_blocks_still_gives_those_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that is full, or whose credentials may read only."""
    source, hashes = await put_before(f"object:file://{tmp_path}", count=4)
    async with BlockStore.open([f"object:file://{tmp_path}"]) as store:
        tier = tier_of(store, ObjectTier)
        requests = Requests(tier)

        async def full(name: str) -> None:
            if name == "put_async":
                raise obstore.exceptions.GenericError("it is full")

        requests.before = full
        put = await store.put(chain(2, "b"), source.cache, [0, 1])
        assert not put.landed
        assert not tier.taking
        assert (await store.get(hashes, Filled().cache, range(4))).complete
        assert (tier.error, tier.reason) == ("it is full", "")
        with pytest.raises(OSError, match="it is full"):
            await store.flush()
        requests.before = None
        end_pauses(monkeypatch)
        await store.flush()
        assert tier.error == ""


@pytest.mark.usefixtures("long_pauses")
async def test_an_answer_from_before_a_failure_ends_no_pause(tmp_path: Path) -> None:
    """While the store is left alone, what is not there is not known not to be there."""
    await put_before(f"object:file://{tmp_path}", count=2)
    async with BlockStore.open([f"object:file://{tmp_path}"]) as store:
        tier = tier_of(store, ObjectTier)
        requests, go = Requests(tier), asyncio.Event()

        async def fail_last(name: str) -> None:
            if requests.made.count(name) == 1:
                await go.wait()
            else:
                raise OSError(errno.ECONNRESET, "reset by peer")

        requests.before = fail_last
        keys = as_keys(NAMESPACE.digest + one for one in chain(2))
        finding = asyncio.create_task(tier.find(keys))
        await until(lambda: tier.reason)
        go.set()
        await finding
        assert not tier.taking
        assert "reset by peer" in tier.reason


async def test_a_request_without_an_answer_ends(tmp_path: Path) -> None:
    source = Filled(seed=1)
    async with BlockStore.open([f"object:file://{tmp_path}?timeout=0.1"]) as store:
        requests = Requests(tier_of(store, ObjectTier))

        async def hang(_: str) -> None:
            await asyncio.Event().wait()

        requests.before = hang
        put = await store.put(chain(1), source.cache, [0])
        assert "no answer in 0.1 s" in put.missing["kv", 0]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("http://127.0.0.1/kv", "http is not a supported object store; choose one of"),
        ("ftp://host/kv", "ftp is not a supported object store"),
        ("", "nothing is not a supported object store"),
        (
            "s3://b/p?endpoint=127.0.0.1:9000",
            "not an HTTP address; write http://127.0.0.1:9",
        ),
        ("s3://b/p?endpoint_url=minio", "not an HTTP address; write http://minio"),
        ("s3://b/p?endpoint=ftp://minio", "not an HTTP address; write http://minio"),
    ],
)
async def test_a_place_that_cannot_work_is_refused_by_name(
    place: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        await BlockStore.open([f"object:{place}"])


async def test_a_host_that_refuses() -> None:
    """S3 where nobody listens, with what would be its credentials."""
    tier = "object:s3://bucket/kv?endpoint=http://127.0.0.1:1&region=x&timeout=60"
    async with BlockStore.open([tier]) as store:
        put = await store.put(chain(1), Filled(seed=1).cache, [0])
        assert "127.0.0.1:1" in put.missing["kv", 0]
        assert "Connection refused" in put.missing["kv", 0]
        assert tier_of(store, ObjectTier).reason


async def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    command = install_command("objects", distribution="kvwire-store")
    with pytest.raises(BackendUnavailable, match=re.escape(command)):
        await BlockStore.open(["object:memory:///"])


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(obstore.exceptions.GenericError("refused"), id="fails"),
        pytest.param(FileNotFoundError(errno.ENOENT, "not there"), id="not there"),
    ],
)
async def test_an_error_that_obstore_keeps_does_not_keep_a_stores_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Its threads have their errors a little longer than those who asked."""
    async with BlockStore.open(["memory:1MiB", f"object:file://{tmp_path}"]) as store:
        requests = Requests(tier_of(store, ObjectTier))

        async def refuse(_name: str) -> None:
            raise error

        requests.before = refuse
        put = await store.put(chain(2), Filled(seed=1).cache, range(2))
        assert "it is in memory only" in put.missing["kv", 0]
    assert error.__traceback__ is None
    assert "stay in use" not in caplog.text


# --- what object stores say is wrong, in the words that a user reads ------------------

INTERNAL = 500
HEAD = "Error performing GET http://h/b/kv/a in 3ms - Server returned non-2xx status "
BODY = "<Error><Code>{code}</Code><Message>{message}</Message></Error>"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")


class Answering:
    """An S3 that answers each request in one way, and counts them."""

    def __init__(
        self, status: int, body: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.body = body
        self.headers = dict(headers or {})
        self.asked: list[str] = []
        # Where objects are, if not here.
        self.elsewhere = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.method)
        if request.match_info["path"] == "bucket/" and self.elsewhere:
            return web.Response(status=404)
        if self.elsewhere:
            self.headers["Location"] = self.elsewhere
        return web.Response(status=self.status, text=self.body, headers=self.headers)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        try:
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def tier(url: str, timeout_s: int = 20) -> str:
    options = f"endpoint={url}&region=us-east-1&timeout={timeout_s}"
    return f"object:s3://bucket/kv?{options}"


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (404, "NoSuchBucket", "make it first"),
        (400, "ExpiredToken", "renew the credentials"),
        (403, "InvalidAccessKeyId", "see the credentials"),
        (403, "AccessDenied", "allow to get, put, delete and list"),
        (403, "RequestTimeTooSkewed", "set this machine's clock"),
        (503, "SlowDown", ""),
        (507, "XMinioStorageFull", ""),
        (404, "ContainerNotFound", "make it first"),
    ],
)
async def test_the_name_of_what_is_wrong_is_kept(
    caplog: pytest.LogCaptureFixture, status: int, code: str, remedy: str
) -> None:
    """In the outcome, in the report, in one line of the log, and by a flush."""
    body = BODY.format(code=code, message="It is so.")
    source = Filled(seed=1)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(Answering(status, body).serving())
        # What may pass is asked for again, for most of the time that it may take.
        name = tier(url, 3) if status > INTERNAL else tier(url)
        opening = BlockStore.open(["memory:256KiB", name])
        store = await stack.enter_async_context(opening)
        for turn in range(2):
            put = await store.put(chain(2, str(turn)), source.cache, [0, 1])
            (reason,) = put.missing.reasons
            assert not put.landed
            assert f"{code}: It is so" in reason
            assert remedy in reason
        assert f"{code}: It is so" in store.report[name]
        with pytest.raises(OSError, match=rf"^4 blocks are in .*{code}: It is so"):
            await store.flush()
        assert await store.match(chain(2, "other"), source.cache) == 0
        await inside.tiers(store).memory.empty()
    (line,) = warned(caplog)
    assert line.startswith(f"tier {name}: {code}: It is so")


@pytest.mark.parametrize("body", ["", "<html>no such page</html>"])
async def test_a_404_of_no_object_store_is_a_failure(body: str) -> None:
    async with (
        Answering(404, body).serving() as url,
        BlockStore.open(["memory:256KiB", tier(url)]) as store,
    ):
        got = await store.get(chain(1), Filled().cache, [0])
        assert "404 Not Found" in got.missing["kv", 0]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_block_goes_to_another_host(status: int) -> None:
    """Neither with the first request, nor when the server has come back."""
    other = Answering(200, "")
    async with other.serving() as elsewhere:
        sends = Answering(status, "", {"Location": f"{elsewhere}/bucket/"})
        async with (
            sends.serving() as url,
            BlockStore.open(["memory:256KiB", tier(url)]) as store,
        ):
            put = await store.put(chain(1), Filled(seed=1).cache, [0])
            (reason,) = put.missing.reasons
            assert f"it redirects to {elsewhere}" in reason
            sends.status, sends.headers = 404, {}
            sends.body = BODY.format(code="NoSuchKey", message="")
    assert sends.asked == ["HEAD"]
    assert not other.asked


@pytest.mark.parametrize("status", [303, 307])
@pytest.mark.parametrize("verb", ["put", "get", "delete"])
async def test_an_object_that_is_elsewhere_is_not_followed_there(
    monkeypatch: pytest.MonkeyPatch, status: int, verb: str
) -> None:
    """A bucket that redirects nothing but its objects is sent no token for them."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "temporary")
    source = Filled(seed=1).cache
    other, sends = Answering(200, "<ok/>"), Answering(404, "")
    async with (
        other.serving() as elsewhere,
        sends.serving() as url,
        BlockStore.open(["memory:256KiB", tier(url, 2)]) as store,
    ):
        sends.status = status
        sends.elsewhere = elsewhere.replace("127.0.0.1", "localhost")
        if verb == "put":
            done = await store.put(chain(1), source, [0])
            assert done.missing
        elif verb == "get":
            done = await store.get(chain(1), source, [0])
            assert done.missing
        else:
            with pytest.raises(OSError, match="delete"):
                await store.delete(chain(1), source)
    assert sends.asked[1:]
    assert not other.asked


def test_a_role_without_a_region_gets_its_credentials_where_obstore_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    where = TierAddress.parse("object:s3://bucket/kv?endpoint=http://127.0.0.1:1")
    reached = bucket_of(where, 2.0).client_options["proxy_excludes"].split(",")
    assert "sts.us-east-1.amazonaws.com" in reached


async def test_a_server_of_credentials_that_the_address_names_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be another host than the objects'."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    gives, store = Answering(403, ""), Answering(404, "")
    async with gives.serving() as at, store.serving() as url:
        where = at.replace("127.0.0.1", "localhost")
        where = f"{tier(url)}&metadata_endpoint={where}"
        bucket = bucket_of(TierAddress.parse(where), 20.0)
        with pytest.raises(BaseError):
            await obstore.put_async(bucket, "one", b"")
    assert gives.asked


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            HEAD + "code: 403 Forbidden: <Error><Code>No</Code></Error>\n\nDebug "
            "source:\n<Code>Other</Code>",
            "No",
        ),
        (
            HEAD + "code: 502 Bad Gateway: <html>",
            "http://h answers 502 Bad Gateway, without",
        ),
        (
            "Error - it fails\n\nDebug source:\nInvalidCertificate(x)",
            "Error - it fails: its cert",
        ),
        (
            "Error - it fails\n\nDebug source:\nConnect, 127.0.0.1:0, Os",
            "Error - it fails: it redirects to another host",
        ),
        (
            "Generic S3 error: " + HEAD.partition("Server")[0] + "it hung up",
            "it hung up",
        ),
        (
            'GET - HTTP error: sending\n\nDebug source: Os { message: "refused" }',
            "GET - HTTP error: sending: refused",
        ),
        (
            HEAD + "code: 403 Forbidden: " + BODY.format(code="No", message="\x1b[2J"),
            "No",
        ),
        (
            HEAD
            + "code: 400 Bad Request: "
            + BODY.format(code="A" * 64, message="é" * 999),
            "A",
        ),
        ("one line\nand more", "one line"),
    ],
)
def test_words(text: str, words: str) -> None:
    said = words_of(OSError(text))
    assert said.startswith(words)
    assert len(said) <= REASON_CHARS_MAX
    assert said.isprintable()


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("Object at location a not found: No such file or directory", True),
        (HEAD + "code: 404 Not Found: <Code>NoSuchKey</Code>", True),
        (HEAD + "code: 404 Not Found: <Code>BlobNotFound</Code>", True),
        (HEAD + "code: 404 Not Found: <Code>NoSuchBucket</Code>", False),
        (HEAD + "code: 404 Not Found: ", False),
    ],
)
def test_one_object_is_missing_or_all_of_them(text: str, gone: bool) -> None:
    assert is_no_object(FileNotFoundError(text)) is gone
    assert not is_no_object(PermissionError(text))
