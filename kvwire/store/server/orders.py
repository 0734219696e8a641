"""Verbs by HTTP: ``POST /kv/pin``, with a key in ``Authorization``.

The HTTP server runs elsewhere, on threads, such as
:class:`kvwire.observe.http.MetricsServer`. Here each order is authorized and executed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import CancelledError
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kvwire import Snapshot
from kvwire.errors import AuthenticationFailed, KVWireError, UsageError, error_text
from kvwire.security.keys import read_key_file
from kvwire.security.tls import CredentialFiles
from kvwire.security.web_pages import why_foreign
from kvwire.store.limits import STORE_ORDER_BYTES_MAX, STORE_VERB_TIMEOUT_S
from kvwire.store.operations.verbs import carry_out
from kvwire.store.order import VERBS, VerbOrder, described
from kvwire.store.placement import READING, Placement
from kvwire.store.server.messages import StatsReport
from kvwire.store.server.served import NOBODY
from kvwire.store.server.server import StoreServer, served_by
from kvwire.types import HttpClient, Role, is_loopback
from kvwire.wire.control import DECODE_ERRORS
from kvwire.wire.handshake_messages import key_id

logger: logging.Logger = logging.getLogger("kvwire.store")

_PATH: Final = "/kv/"
_AWAY: Final = HTTPStatus.SERVICE_UNAVAILABLE
_JSON: Final = "application/json"


class OrderRefused(Exception):
    """Reports that an order was refused, with the HTTP status.

    Attributes:
        status: The status.
    """

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status: HTTPStatus = status


class StoreOrders:
    """Executes the verbs that clients send by HTTP.

    Made on the server's loop, and called on threads.

    Attributes:
        bytes_max: The longest body of an order.
    """

    bytes_max: int = STORE_ORDER_BYTES_MAX

    def __init__(self, server: StoreServer) -> None:
        self._served = served_by(server)
        self._loop = asyncio.get_running_loop()
        self._communicator = server.communicator
        config = self._communicator.config
        psk = config.trust == "psk"
        self._operator_key = read_key_file(config.psk_file) if psk else b""
        self._trust = config.trust
        self._tls = CredentialFiles(config) if config.trust == "mtls" else None

    def answer(
        self, path: str, headers: Mapping[str, str], client: HttpClient, body: bytes
    ) -> tuple[HTTPStatus, dict[str, Any]]:
        """Execute the order in a POST.

        Args:
            path: The path, without the query.
            headers: The headers, with names in small letters.
            client: The sender.
            body: The body.

        Returns:
            The status, and the answer for JSON.
        """
        try:
            tenant = self._check(path, headers, client)
            verb = path.removeprefix(_PATH)
            return HTTPStatus.OK, self._carried_out(verb, body, tenant)
        except OrderRefused as exc:
            return exc.status, {"error": str(exc)}

    def reader(self, headers: Mapping[str, str], client: HttpClient) -> str:
        """Return the tenant that a key or a certificate proves, or "" for the operator.

        Args:
            headers: The headers, with names in small letters.
            client: The sender.

        Raises:
            OrderRefused: The request has no key of this server, and its sender no
                accepted certificate.
        """
        if self._trust == "mtls":
            return self._certified(headers, client)
        if self._trust == "loopback" and is_loopback(client.address):
            if why := why_foreign(headers, "start the server with --psk-file"):
                raise OrderRefused(HTTPStatus.FORBIDDEN, why)
            return ""
        kind, _, shown = headers.get("authorization", "").partition(" ")
        try:
            key = bytes.fromhex(shown) if kind == "Bearer" else b""
        except ValueError:
            key = b""
        if key and hmac.compare_digest(key, self._operator_key):
            return ""
        tenant = self._served.proofs.get(key_id(key), "") if key else ""
        if not tenant:
            why = "authorization: send Bearer and the tenant's or the operator's key"
            raise OrderRefused(HTTPStatus.UNAUTHORIZED, why)
        return tenant

    def _certified(self, headers: Mapping[str, str], client: HttpClient) -> str:
        if not client.identity:
            why = "certificate: connect by https, with one that tls_peers accepts"
            raise OrderRefused(HTTPStatus.UNAUTHORIZED, why)
        # A browser shows its user's certificate for the pages of others, too.
        if why := why_foreign(headers, "", by_name=True):
            raise OrderRefused(HTTPStatus.FORBIDDEN, why)
        tenant = self._served.proved(client.identity)
        if tenant is None:
            raise OrderRefused(HTTPStatus.FORBIDDEN, f"certificate: {NOBODY}")
        return tenant

    def secured(self, connection: socket.socket) -> ssl.SSLSocket | None:
        """Return a client's socket inside TLS, before the handshake.

        None if this server has no certificates.
        """
        if self._tls is None:
            return None
        context = self._tls.current().contexts[Role.SERVER]
        return context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def identity(self, tls: ssl.SSLSocket) -> str:
        """Return the identity that a client has proved; "" if it is not accepted."""
        assert self._tls is not None
        try:
            return self._tls.current().proven(tls, Role.SERVER).identity
        except AuthenticationFailed as exc:
            logger.info("a client of HTTP is not accepted: %s", exc)
            return ""

    def report(self, tenant: str) -> tuple[StatsReport, Snapshot | None]:
        """Return the server's numbers, and its process; on the server's loop.

        A tenant gets only its own numbers, and nothing about the process.
        """
        report = self._served.report(0, tenant)
        return report, None if tenant else self._communicator.snapshot()

    def _check(self, path: str, headers: Mapping[str, str], client: HttpClient) -> str:
        """Return the tenant that may order something here; "" for the operator."""
        if path.removeprefix(_PATH) not in VERBS:
            why = f"there are {', '.join(_PATH + verb for verb in VERBS)}"
            raise OrderRefused(HTTPStatus.NOT_FOUND, why)
        # A browser sends this type for a page of another host only after asking
        # permission.
        if headers.get("content-type", "").partition(";")[0].strip() != _JSON:
            why = f"content-type: send {_JSON}"
            raise OrderRefused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why)
        return self.reader(headers, client)

    def _carried_out(self, verb: str, body: bytes, tenant: str) -> dict[str, Any]:
        """Execute a verb on the store's loop, and return its placement for JSON."""
        try:
            order = msgspec.json.decode(body, type=VerbOrder)
            work = self._placement(verb, order, tenant)
            try:
                running = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:
                work.close()
                raise OrderRefused(_AWAY, "the store is closed") from None
            try:
                return described(running.result(STORE_VERB_TIMEOUT_S))
            except (TimeoutError, CancelledError):
                running.cancel()
                why = f"it did not finish within {STORE_VERB_TIMEOUT_S:g} s"
                raise OrderRefused(_AWAY, why) from None
        except DECODE_ERRORS as exc:
            why = f"the body is not the expected JSON: {exc}"
            raise OrderRefused(HTTPStatus.BAD_REQUEST, why) from None
        except UsageError as exc:
            raise OrderRefused(HTTPStatus.BAD_REQUEST, str(exc)) from None
        except (KVWireError, OSError) as exc:
            raise OrderRefused(_AWAY, error_text(exc)) from None

    async def _placement(self, name: str, order: VerbOrder, tenant: str) -> Placement:
        verb = order.verb(name)
        hashes = order.named()
        if tenant and order.tenant not in ("", tenant):
            why = f"it is tenant {tenant}, and cannot act for {order.tenant!r}"
            raise OrderRefused(HTTPStatus.FORBIDDEN, why)
        if self._served.read_only and verb.kind not in READING:
            raise OrderRefused(HTTPStatus.FORBIDDEN, "this server is read-only")
        if self._served.access.is_closed():
            raise OrderRefused(_AWAY, "the store is closed")
        tiers = self._served.access.tiers
        namespaces = tiers.of_tenant(tenant or order.tenant)
        # A close of the server waits for this task.
        task = asyncio.current_task()
        assert task is not None
        self._served.orders.add(task)  # bounded: by the threads of HTTP
        task.add_done_callback(self._served.orders.discard)
        return await carry_out(tiers, verb, namespaces, hashes)
