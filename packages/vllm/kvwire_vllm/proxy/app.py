"""The proxy's routes, independent of the HTTP server that calls them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from kvwire.aio import end_task, start_task
from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.limits import KIB
from kvwire.security.web_pages import why_foreign
from kvwire.types import in_bytes, is_loopback
from kvwire.wire.control import DECODE_ERRORS
from kvwire_vllm.proxy import asgi
from kvwire_vllm.proxy.admission import Admission, QueueFull
from kvwire_vllm.proxy.client import (
    PROBE_S,
    EngineClient,
    EngineFailed,
    EngineResponse,
    Prober,
)
from kvwire_vllm.proxy.discovery import Discovery
from kvwire_vllm.proxy.dispatch import ClientRequest, Dispatcher
from kvwire_vllm.proxy.engines import VllmEngine
from kvwire_vllm.proxy.exchange import (
    CLIENT_CLOSED,
    HttpAnswer,
    HttpRequest,
    Refused,
    as_json,
    openai_error,
)
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.limits import (
    PROXY_BODY_BYTES_MAX,
    PROXY_BODY_BYTES_PER_S,
    PROXY_BODY_S,
    PROXY_BODY_VALUES_MAX,
    PROXY_ORDER_BYTES_MAX,
)
from kvwire_vllm.proxy.moving import STAYED, Moves
from kvwire_vllm.proxy.passing import (
    body_of,
    for_client,
    for_engine,
    is_form,
    methods_of,
    query_of,
)
from kvwire_vllm.proxy.policy import AT_ONCE
from kvwire_vllm.proxy.stopping import Ending
from kvwire_vllm.proxy.view import ProxyCollector, ProxyState, fleet_view
from kvwire_vllm.references import UNSIGNED, References

with needed_by("the proxy", command="pip install aiohttp"):
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

logger: logging.Logger = logging.getLogger("kvwire.vllm")

# Request headers that are passed to engines. The others concern one connection, or are
# meant for the proxy.
_PASSED_HEADERS: Final = (
    "authorization",
    "x-request-id",
    "traceparent",
    "tracestate",
    "origin",  # the page's origin: engines decide whether it may read the answer
)
# Answer headers that are passed to clients, beside those that engines set for pages.
_KEPT_HEADERS: Final = (
    "content-type",
    "content-encoding",
    "content-length",
    "x-request-id",
    "retry-after",
    "www-authenticate",
    "vary",
)
_OF_PAGES: Final = "access-control-"
# A larger field is forwarded unchanged, without decoding and encoding it.
_LARGE_BYTES: Final = 64 * KIB
# How many of the PROXY_BODY_VALUES_MAX values each object or list counts as.
_CONTAINER_VALUES: Final = 8
_LENGTH_DIGITS: Final = 18
_EVENTS: Final = "text/event-stream"
_DRAIN_WAIT_S_MAX: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """The choices of a proxy's operator; see the options of its command.

    Attributes:
        order: Whether both engines get a request at once, or decode after prefill.
        references: Signs references to prefilled KV with the engines' key.
        admission: Limits the requests that run and wait; by default the usual limits.
        operator_key: The key that operators send; empty for requests of this host only.
        migrate: Whether streams can continue at another engine.
    """

    order: str = AT_ONCE
    references: References = UNSIGNED
    admission: Admission | None = None
    operator_key: bytes = b""
    migrate: bool = False


def make_app(
    fleet: EngineFleet,
    settings: ProxySettings,
    *,
    discovery: Discovery | None = None,
    client: EngineClient | None = None,
    ending: Ending | None = None,
) -> ProxyApp:
    """Return the proxy as an application."""
    client = client or EngineClient()
    front = _Front(fleet, client, ending or Ending(), settings, discovery)
    prober = Prober(fleet, client)
    running = [prober.run]
    if discovery is not None:
        discovery.wake = prober.wake
        running.append(discovery.watch)

    @asynccontextmanager
    async def run() -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            if discovery is not None:
                stack.push_async_callback(discovery.close)
            for work in running:
                stack.push_async_callback(end_task, _started(work()))
            yield

    return ProxyApp(front, run)


class ProxyApp:
    """Answers HTTP requests; also usable as an ASGI application."""

    def __init__(
        self,
        front: _Front,
        run: Callable[[], contextlib.AbstractAsyncContextManager[None]],
    ) -> None:
        #: Runs the background work while it is open.
        self.running = run
        self._front = front
        read = ("GET", "HEAD")
        write = ("POST",)
        self._routes: dict[str, tuple[tuple[str, ...], _Handler]] = {
            "/v1/completions": (write, front.generate),
            "/v1/chat/completions": (write, front.generate),
            "/health": (read, front.health),
            "/metrics": (read, front.metrics),
            "/fleet": (read, front.fleet),
            "/drain": (write, front.drain),
            "/migrate": (write, front.migrate),
        }

    async def __call__(
        self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
    ) -> None:
        """Handle one scope from an ASGI server.

        Cancel safety: safe, the request is cancelled.
        """
        await asgi.serve(self, scope, receive, send)

    @asynccontextmanager
    async def answered(self, asked: HttpRequest) -> AsyncIterator[HttpAnswer]:
        """Answer a request; its resources are released when the block ends.

        Cancel safety: safe, its requests to engines are cancelled.
        """
        async with AsyncExitStack() as stack:
            try:
                answer = await self._handler(asked)(asked, stack)
            except (Refused, QueueFull, EngineFailed, UsageError) as exc:
                await stack.aclose()
                answer = _refused(exc)
            yield answer

    def _handler(self, asked: HttpRequest) -> _Handler:
        passed = methods_of(asked.path), self._front.passed
        methods, handler = self._routes.get(asked.path, passed)
        if not methods:
            why = f"{asked.path} is not passed to engines; send it to one directly"
            raise Refused(HTTPStatus.NOT_FOUND, why)
        # Browsers send OPTIONS to learn what a page may request; engines know the
        # answer.
        if asked.method == "OPTIONS" and handler in (passed[1], self._front.generate):
            return self._front.passed
        if asked.method not in methods:
            why = f"{asked.path} takes {methods[0]}, not {asked.method}"
            allow = {"allow": ", ".join(methods)}
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, why, allow)
        return handler


def _started(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start work that should never end; if it ends, log the plug-in's error."""
    task = start_task(work)

    def log_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error(
                "the discovery of engines has failed", exc_info=task.exception()
            )

    task.add_done_callback(log_failure)
    return task


class _Front:
    """Implements the routes of the proxy."""

    def __init__(
        self,
        fleet: EngineFleet,
        client: EngineClient,
        ending: Ending,
        settings: ProxySettings,
        discovery: Discovery | None,
    ) -> None:
        self.ending = ending
        self.settings = settings
        self.dispatcher = Dispatcher(
            client, fleet, order=settings.order, references=settings.references
        )
        self.state = ProxyState(
            fleet,
            settings.admission or Admission(),
            self.dispatcher.budget,
            lambda: discovery.ignored if discovery else 0,
        )
        self.moves = Moves(
            self.dispatcher,
            fleet,
            self.state.moves,
            migrate=settings.migrate,
        )
        self.registry = CollectorRegistry()
        self.registry.register(ProxyCollector(self.state))
        # Held while a large body is decoded.
        self.large = asyncio.Lock()

    async def generate(self, asked: HttpRequest, stack: AsyncExitStack) -> HttpAnswer:
        return await self._counted(self._generated(asked, stack))

    async def passed(self, asked: HttpRequest, stack: AsyncExitStack) -> HttpAnswer:
        """Pass a request unchanged to one engine, which answers it alone."""
        answering = self._passed(asked, stack)
        return await (self._counted(answering) if _works(asked) else answering)

    async def _counted(self, answering: Coroutine[Any, Any, HttpAnswer]) -> HttpAnswer:
        status = CLIENT_CLOSED
        try:
            answer = await answering
            status = answer.status
        except (Refused, QueueFull, EngineFailed) as exc:
            status = _refused(exc).status
            raise
        finally:
            self.state.answered[status] += 1
        return answer

    async def _generated(self, asked: HttpRequest, stack: AsyncExitStack) -> HttpAnswer:
        # Before the body is read, so that the limits also apply to requests whose body
        # arrives slowly or never.
        take = stack.enter_context(self.state.admission.place())
        content = await _read(asked, PROXY_BODY_BYTES_MAX, take)
        async with self._alone(content):
            body, large = _decoded(content)
        del content  # large values are kept in the fields
        # Only the proxy may give engines the names of other engines.
        body.pop("kv_transfer_params", None)
        headers = _passed_on(asked)
        since = self.state.fleet.clock()
        request = ClientRequest(asked.path, body, headers, since, large=large)
        async with self.ending.limits():
            return self._relayed(await self._asked(request, stack), stack)

    @asynccontextmanager
    async def _alone(self, content: bytes) -> AsyncIterator[None]:
        """Wait until a large body may be decoded: one at a time, and one per loop turn.

        Without this, bodies that arrive together would also be decoded together.
        """
        if len(content) < _LARGE_BYTES:
            yield
            return
        async with self.large:
            yield
            await asyncio.sleep(0)

    async def _passed(self, asked: HttpRequest, stack: AsyncExitStack) -> HttpAnswer:
        content = b""
        if _works(asked):
            take = stack.enter_context(self.state.admission.place())
            content = await _read(asked, PROXY_BODY_BYTES_MAX, take)
        async with self._alone(content):
            content = body_of(content, asked.headers)
        request = ClientRequest(
            asked.path,
            {},
            for_engine(asked.headers),
            self.state.fleet.clock(),
            method="GET" if asked.method == "HEAD" else asked.method,
            content=content,
            query=query_of(asked.query),
        )
        async with self.ending.limits():
            if _works(asked):
                answer = await self._asked(request, stack)
            else:
                answer = await self.dispatcher.ask(request, stack)
            return self._relayed(answer, stack, passed=True)

    async def health(self, _: HttpRequest, __: AsyncExitStack) -> HttpAnswer:
        if self.state.fleet.lives():
            return as_json({"status": "ok"})
        why = "no engine is up"
        return as_json({"status": why}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def metrics(self, _: HttpRequest, __: AsyncExitStack) -> HttpAnswer:
        headers = {"content-type": CONTENT_TYPE_LATEST}
        return HttpAnswer(headers=headers, body=generate_latest(self.registry))

    async def fleet(self, _: HttpRequest, __: AsyncExitStack) -> HttpAnswer:
        return as_json(fleet_view(self.state))

    async def drain(self, asked: HttpRequest, _: AsyncExitStack) -> HttpAnswer:
        """Stop sending new requests to an engine, and move its streams if possible.

        Answer when the engine has no requests left, or after ``wait_s``.
        """
        self._check_operator(asked)
        wanted = await _order(asked, _Drain)
        engine = self.state.fleet.drain(wanted.engine, draining=wanted.drain)
        if self.moves.migrate and wanted.drain and wanted.move:
            async with self.ending.limits():
                await self.moves.move(self._at(engine))
        with contextlib.suppress(TimeoutError):
            wait_s = min(wanted.wait_s, _DRAIN_WAIT_S_MAX)
            async with self.ending.limits(), asyncio.timeout(wait_s):
                await engine.idle()
        status = HTTPStatus.ACCEPTED if engine.running else HTTPStatus.OK
        return as_json({"engine": engine.url, "running": engine.running}, status)

    async def migrate(self, asked: HttpRequest, _: AsyncExitStack) -> HttpAnswer:
        """Move one request, or all requests of an engine, to another engine."""
        self._check_operator(asked)
        if not self.moves.migrate:
            why = "the proxy was started without --migrate"
            raise Refused(HTTPStatus.CONFLICT, why)
        wanted = await _order(asked, _Migrate)
        to = self.state.fleet.at(wanted.to) if wanted.to else None
        if not wanted.request:
            moving = self._at(self.state.fleet.at(wanted.engine))
        elif not (moving := self.moves.named(wanted.request)):
            why = f"no running request that can move has the id {wanted.request!r}"
            raise Refused(HTTPStatus.NOT_FOUND, why)
        async with self.ending.limits():
            moved = await self.moves.move(moving, to)
        stayed = any(STAYED in one for one in moved)
        status = HTTPStatus.CONFLICT if stayed else HTTPStatus.OK
        return as_json({"requests": moved}, status)

    def _at(self, engine: VllmEngine) -> list[ClientRequest]:
        return [asked for asked in self.state.requests if asked.decode is engine]

    def _check_operator(self, asked: HttpRequest) -> None:
        if key := self.settings.operator_key:
            right = b"Bearer " + key.hex().encode()
            shown = asked.headers.get("authorization", "").encode()
            allowed = hmac.compare_digest(right, shown)
        else:
            allowed = is_loopback(asked.client)
            remedy = "start the proxy with --operator-key-file"
            if allowed and (why := why_foreign(asked.headers, remedy)):
                raise Refused(HTTPStatus.FORBIDDEN, why)
        if not allowed:
            why = "send it from this host, or with the operator's key"
            raise Refused(HTTPStatus.FORBIDDEN, why)

    async def _asked(
        self, asked: ClientRequest, stack: AsyncExitStack
    ) -> EngineResponse:
        """Wait for the request's turn, then get its answer from the engines."""
        requests = self.state.requests
        requests[asked] = None  # bounded: PROXY_RUNNING_MAX and PROXY_WAITING_MAX
        stack.callback(requests.pop, asked)
        await stack.enter_async_context(self.state.admission.turn())
        if asked.content is None:
            return await self.moves.ask(asked, stack)
        return await self.dispatcher.ask(asked, stack)

    def _relayed(
        self, answer: EngineResponse, stack: AsyncExitStack, *, passed: bool = False
    ) -> HttpAnswer:
        """Return an engine's answer with only the headers that a client may see."""
        kept = for_client(answer.headers)
        if not passed:
            kept = {
                name: value
                for name, value in kept.items()
                if name in _KEPT_HEADERS or name.startswith(_OF_PAGES)
            }
        # Without a length, servers send chunks, which HTTP/1.0 clients do not
        # understand. A stream of events keeps no length, because an error may be
        # appended to it.
        added = not passed and _is_events(answer)
        if added or not kept.get("content-length", "").isdecimal():
            kept.pop("content-length", None)
        parts = _relay(answer, self.ending, passed=passed)
        stack.push_async_callback(parts.aclose)
        return HttpAnswer(answer.status, kept, parts)


def _works(asked: HttpRequest) -> bool:
    """Return whether a request needs an engine and so has to wait for its turn."""
    return asked.method == "POST"


_Handler: TypeAlias = Callable[[HttpRequest, AsyncExitStack], Awaitable[HttpAnswer]]


class _Drain(msgspec.Struct):
    engine: str
    drain: bool = True
    wait_s: float = 0.0
    move: bool = True


class _Migrate(msgspec.Struct):
    engine: str = ""
    request: str = ""
    to: str = ""


T = TypeVar("T")


async def _order(asked: HttpRequest, kind: type[T]) -> T:
    """Decode an operator's order from the request body."""
    content = await _read(asked, PROXY_ORDER_BYTES_MAX)
    with _as_wanted():
        return msgspec.json.decode(content, type=kind)


def _decoded(content: bytes) -> tuple[dict[str, Any], dict[str, msgspec.Raw]]:
    """Decode a request; return its fields, and the raw bytes of the large ones.

    NaN and lone surrogates are refused: Python's own decoder accepts them, but they
    cannot be encoded again for an engine.
    """
    with _as_wanted():
        if len(content) < _LARGE_BYTES:
            return msgspec.json.decode(content, type=dict[str, Any]), {}
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        body = {name: msgspec.json.decode(raw) for name, raw in fields.items()}
        sizes = {name: memoryview(raw).nbytes for name, raw in fields.items()}
    large = {name: raw for name, raw in fields.items() if sizes[name] > _LARGE_BYTES}
    return body, large


@contextlib.contextmanager
def _as_wanted() -> Iterator[None]:
    try:
        yield
    except DECODE_ERRORS as exc:
        why = f"the body is not the expected JSON: {exc}"
        raise Refused(HTTPStatus.BAD_REQUEST, why) from None


async def _read(
    asked: HttpRequest, bytes_max: int, take: Callable[[int], None] | None = None
) -> bytes:
    """Read a request's body; refuse one that is too slow, too large or compressed."""
    for name in ("content-encoding", "transfer-encoding"):
        coding = asked.headers.get(name, "identity")
        if coding.lower() not in ("identity", "chunked"):
            why = f"{name} {coding}: send the body uncompressed"
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why)
    length = asked.headers.get("content-length", "")
    too_large = Refused(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body has more than {in_bytes(bytes_max)}",
    )
    if length.isdecimal() and (len(length) > _LENGTH_DIGITS or int(length) > bytes_max):
        raise too_large
    content = bytearray()
    values = 0
    counted = not is_form(asked.headers)
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(PROXY_BODY_S) as wait:
            async for part in asked.parts:
                content += part
                if len(content) > bytes_max:
                    raise too_large
                if take is not None:
                    take(len(part))
                values += part.count(b",")
                values += _CONTAINER_VALUES * (part.count(b"[") + part.count(b"{"))
                if counted and values > PROXY_BODY_VALUES_MAX:
                    why = f"the body has more than {PROXY_BODY_VALUES_MAX} values"
                    raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
                here_s = len(content) / PROXY_BODY_BYTES_PER_S
                wait.reschedule(began + PROXY_BODY_S + here_s)
    except TimeoutError:
        in_s = asyncio.get_running_loop().time() - began
        why = f"only {in_bytes(len(content))} of the body arrived within {in_s:.0f} s"
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, why) from None
    return bytes(content)


def _passed_on(asked: HttpRequest) -> dict[str, str]:
    passed = for_engine(asked.headers)
    return {name: passed[name] for name in _PASSED_HEADERS if name in passed}


def _is_events(answer: EngineResponse) -> bool:
    return answer.headers.get("content-type", "").startswith(_EVENTS)


async def _relay(
    answer: EngineResponse, ending: Ending, *, passed: bool
) -> AsyncGenerator[bytes]:
    try:
        while True:
            async with ending.limits():
                part = await anext(answer.parts, None)
            if part is None:
                return
            yield part
    except EngineFailed as exc:
        logger.warning("an answer was cut off: %s", exc)
        # An error can be appended only to a stream of the kind that the proxy writes.
        if passed or not _is_events(answer):
            raise
        why = f"the engine broke off: {exc.why}" if exc.engine else exc.why
        error = openai_error(HTTPStatus.BAD_GATEWAY, why)
        # The last part sent may have ended in the middle of an event.
        yield b"\n\ndata: " + msgspec.json.encode(error) + b"\n\ndata: [DONE]\n\n"


def _refused(exc: Exception) -> HttpAnswer:
    """Return the error answer for an exception."""
    status = int(HTTPStatus.BAD_REQUEST)
    why = exc.why if isinstance(exc, EngineFailed) else str(exc)
    headers: dict[str, str] = {}
    match exc:
        case Refused():
            status = exc.status
            headers |= exc.headers
        case QueueFull():
            status = HTTPStatus.TOO_MANY_REQUESTS
            headers["retry-after"] = str(exc.retry_after_s)
        case EngineFailed(status=None):
            status = HTTPStatus.SERVICE_UNAVAILABLE
            headers["retry-after"] = str(math.ceil(PROBE_S))
        case EngineFailed(status=int(status)):
            if exc.retry_after.isdecimal():
                headers["retry-after"] = exc.retry_after
    return as_json(openai_error(status, why), status, headers)
