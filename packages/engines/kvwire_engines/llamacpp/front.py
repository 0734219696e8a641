"""An HTTP server in front of a llama-server: sessions outlive the server behind it.

A client changes one URL. For each prompt the front finds the longest stored beginning,
lets the server restore it into an idle slot, and passes the request on with that slot's
number; once it is answered, the front stores what the slot holds. Everything else
passes through. If a session cannot be restored or stored, the request is answered all
the same, and the log has the reason.

What the server computes never depends on the front's bookkeeping: llama-server compares
a prompt with the tokens of the slot, and computes the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, Final, Self, TypeAlias

import msgspec
import numpy as np

from kvwire.aio import gather_all, start_task
from kvwire.errors import KVWireError, ListenError, error_text
from kvwire.extras import needed_by
from kvwire.observe.listening import ClientMistakes
from kvwire.types import Address
from kvwire_engines.llamacpp.sessions import (
    EngineLost,
    LlamaCppSessions,
    ServerIdentity,
)
from kvwire_engines.llamacpp.slot_file import TokenIds

with needed_by("session serve", extra="llamacpp", distribution="kvwire-engines"):
    import aiohttp
    from aiohttp import web
    from aiohttp.http_exceptions import HttpProcessingError

logger: logging.Logger = logging.getLogger("kvwire.llamacpp")
_server_logger: Final = logging.getLogger("kvwire.llamacpp.http")
_server_logger.addFilter(ClientMistakes(HttpProcessingError, web.RequestPayloadError))

_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_NONE: Final = np.empty(0, np.int64)
# Headers of one connection, which the front and the server each write by themselves.
_HOP: Final = frozenset(
    (
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_PROMPTS: Final = ("/completion", "/completions", "/v1/completions")
_CHATS: Final = ("/chat/completions", "/v1/chat/completions")
# Requests that are for more than one sequence of tokens, or for other KV than the
# model's own.
_OTHERS: Final = ("lora", "id_slot", "images", "multimodal_data")

_Headers: TypeAlias = "dict[str, str]"
_fields: Final = msgspec.json.Decoder(dict[str, Any])


class _ClientGone(Exception):
    """A client has closed its connection before it had its answer."""


class _Slot:
    """One slot of the server.

    Attributes:
        number: Its number at the server.
        tokens: The tokens that it holds at least, as far as the front knows.
        used: When it was used last; the smallest first.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: TokenIds = _NONE
        self.used = 0

    def common(self, tokens: TokenIds) -> int:
        """Return the number of leading tokens that a prompt shares with it."""
        size = min(self.tokens.size, tokens.size)
        differ = np.flatnonzero(self.tokens[:size] != tokens[:size])
        return int(differ[0]) if differ.size else size


class SessionFront:
    """Serves the clients of one llama-server. Use it in ``async with``.

    Args:
        sessions: The server's sessions.
        host: The address to listen on.
        port: The port; 0 for any.

    Raises:
        ListenError: It cannot listen there.
    """

    def __init__(self, sessions: LlamaCppSessions, host: str, port: int) -> None:
        self._sessions = sessions
        self._host = host
        self._port = port
        self._client: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._slots: list[_Slot] = []
        self._idle = asyncio.Event()
        self._busy: set[_Slot] = set()
        self._uses = 0
        self._identity: object = None
        self._keeping: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Return where it listens."""
        assert self._runner is not None
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def __aenter__(self) -> Self:
        # Without limits of time and number: a stream lasts as long as its client waits.
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=_BODY_BYTES_MAX)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1.0,
            logger=_server_logger,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as exc:
            await self.__aexit__()
            where = Address("tcp", self._host, self._port)
            text = f"cannot listen on {where}: {exc.strerror or exc}"
            raise ListenError(text, address=str(where), errno=exc.errno) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        assert self._client is not None
        await self._runner.cleanup()
        while self._keeping:
            await asyncio.wait(self._keeping)
        await self._client.close()

    # --- requests ---------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
            prompt = await self._prompt(request, body)
            if prompt is None:
                return await self._pass(request, body)
            return await self._answer(request, *prompt)
        except web.RequestPayloadError as exc:
            return _error(400, error_text(exc))
        except EngineLost as exc:
            return _error(502, error_text(exc))
        except _ClientGone:
            # aiohttp would log the error; it drops an answer.
            return _error(499, "the client has gone")

    async def _prompt(
        self, request: web.Request, body: bytes
    ) -> tuple[dict[str, Any], TokenIds] | None:
        """Return a request's fields and tokens; None if it has no session."""
        path = request.path
        if request.method != "POST" or path not in (*_PROMPTS, *_CHATS):
            return None
        try:
            fields: dict[str, Any] = _fields.decode(body)
        except msgspec.MsgspecError:
            return None  # the server names what is wrong
        if fields.get("n", 1) != 1 or any(fields.get(name) for name in _OTHERS):
            return None
        headers = _passed_on(request.headers)
        try:
            if path in _CHATS:
                prompt = await self._sessions.ask(
                    "/apply-template", fields, "prompt", headers
                )
            else:
                prompt = fields.get("prompt")
            if isinstance(prompt, str):
                wanted = {"content": prompt, "add_special": True, "parse_special": True}
                prompt = await self._sessions.ask(
                    "/tokenize", wanted, "tokens", headers
                )
        except EngineLost as exc:
            logger.info("no session: %s", exc)
            return None  # an image, or a server without these endpoints
        is_plain = isinstance(prompt, list) and all(type(one) is int for one in prompt)
        if not is_plain or not prompt:
            return None
        try:
            return fields, np.array(prompt, np.int64)
        except OverflowError:
            return None

    async def _answer(
        self, request: web.Request, fields: dict[str, Any], tokens: TokenIds
    ) -> web.StreamResponse:
        """Pass a request on with a slot, and keep the slot's session afterwards."""
        headers = _passed_on(request.headers)
        identity = await self._look(headers)
        slot = await self._take(tokens)
        kept = False
        try:
            await self._fill(slot, tokens, identity, headers)
            fields = {**fields, "id_slot": slot.number, "cache_prompt": True}
            try:
                response = await self._pass(request, msgspec.json.encode(fields))
            finally:
                # Whatever it has computed, also for a client that has gone.
                slot.tokens = tokens if identity == self._identity else _NONE
                keeping = start_task(self._keep(slot, headers))
                self._keeping.add(keeping)
                keeping.add_done_callback(self._keeping.discard)
                kept = True
        finally:
            if not kept:
                self._give_back(slot)
        return response

    async def _fill(
        self,
        slot: _Slot,
        tokens: TokenIds,
        identity: ServerIdentity,
        headers: _Headers,
    ) -> None:
        """Restore a longer beginning of the prompt than the slot holds, if stored."""
        there = slot.common(tokens)
        try:
            found = await self._sessions.get(
                slot.number,
                tokens,
                more_than=there,
                identity=identity,
                headers=headers,
            )
        except KVWireError as exc:
            slot.tokens = _NONE
            logger.warning("a session is not restored: %s", exc)
        else:
            slot.tokens = tokens[: max(found, there)]

    async def _keep(self, slot: _Slot, headers: _Headers) -> None:
        """Store a slot's tokens, and give the slot back."""
        try:
            await self._sessions.put(slot.number, headers)
        except KVWireError as exc:
            slot.tokens = _NONE
            logger.warning("a session is not stored: %s", exc)
        finally:
            self._give_back(slot)

    async def _pass(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Pass a request on, and its answer back, part by part."""
        assert self._client is not None
        url = self._sessions.url + request.raw_path
        headers = _passed_on(request.headers)
        try:
            answer = await self._client.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as exc:
            raise EngineLost(f"{self._sessions.url}: {error_text(exc)}") from None
        async with answer:
            response = web.StreamResponse(
                status=answer.status,
                reason=answer.reason,
                headers=_passed_on(answer.headers),
            )
            if answer.content_length is not None:
                response.content_length = answer.content_length
            await _to_client(response.prepare(request))
            try:
                parts = aiter(answer.content.iter_any())
                while part := await anext(parts, b""):
                    await _to_client(response.write(part))
            except (aiohttp.ClientError, OSError) as exc:
                # The client must not take a cut answer for a whole one.
                logger.warning("the server's answer ended early: %s", error_text(exc))
                if request.transport is not None:
                    request.transport.abort()
                return response
            await _to_client(response.write_eof())
        return response

    # --- slots ------------------------------------------------------------------------

    async def _look(self, headers: _Headers) -> ServerIdentity:
        """Return the server's identity; forget slots of a server that was replaced."""
        found: ServerIdentity
        holds: dict[int, int]
        asked: list[Coroutine[Any, Any, Any]] = [
            self._sessions.identity(headers),
            self._sessions.held(headers),
        ]
        found, holds = await gather_all(*asked)
        if found != self._identity or len(self._slots) != found.slots:
            self._identity = found
            # A slot that is still answering, or being stored, stays taken.
            taken = {slot.number: slot for slot in self._busy}
            numbers = range(found.slots)
            self._slots = [taken.get(one) or _Slot(one) for one in numbers]
            for slot in self._slots:
                slot.tokens = _NONE
            self._idle.set()  # those who wait for the old ones
        for slot in self._slots:
            if slot not in self._busy and holds.get(slot.number, 0) < slot.tokens.size:
                slot.tokens = _NONE
        return found

    async def _take(self, tokens: TokenIds) -> _Slot:
        """Wait for an idle slot; prefer the one that holds most of the prompt."""
        while not (idle := [s for s in self._slots if s not in self._busy]):
            self._idle.clear()
            await self._idle.wait()
        slot = max(idle, key=lambda one: (one.common(tokens), -one.used))
        self._busy.add(slot)  # bounded: the server's slots
        self._uses += 1
        slot.used = self._uses
        return slot

    def _give_back(self, slot: _Slot) -> None:
        # All wake up: one alone might be cancelled at the same time.
        self._busy.discard(slot)
        self._idle.set()


async def _to_client(sending: Awaitable[object]) -> None:
    """Send a client something of its answer.

    Raises:
        _ClientGone: It has closed its connection.
    """
    try:
        await sending
    except ConnectionError:
        raise _ClientGone from None


def _passed_on(headers: Mapping[str, str]) -> _Headers:
    """Return the headers that concern both ends."""
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def _error(status: int, message: str) -> web.Response:
    """Return an error as llama-server and OpenAI write it."""
    kind = "unavailable_error" if status >= 500 else "invalid_request_error"
    error = {"code": status, "message": message, "type": kind}
    return web.json_response({"error": error}, status=status)
