"""What object stores say is wrong, in the words that a user reads."""

from __future__ import annotations

import pytest

from tests.support import inside

pytest.importorskip("obstore", reason="needs obstore: pip install obstore")

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import obstore.store
from aiohttp import web
from obstore.exceptions import BaseError

from kvwire.limits import REASON_CHARS_MAX
from kvwire_store import BlockStore
from kvwire_store.address import TierAddress
from kvwire_store.tiers.object import bucket_of
from kvwire_store.tiers.object_answers import is_no_object, words_of
from tests.support.caches import Filled, chain
from tests.support.logs import warned

# Its threads start with the first request of a process, and stay.
obstore.put(obstore.store.MemoryStore(), "first", b"")

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
