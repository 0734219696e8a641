"""An engine's requests to its own HTTP server.

There are few of them, so each has its own thread, which ends with it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

logger: logging.Logger = logging.getLogger("kvwire.vllm")

# The time limit for connecting; there is none for the answer.
_CONNECT_S: Final = 1.0


class OwnServer:
    """Sends completions to this engine's own server.

    Args:
        url: Its URL, as :func:`~kvwire_vllm.announce.http_url` returns it.
        model: The name under which it serves the model.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._warned = False
        self.useless: bool = False  # another engine has answered

    def post(self, body: Mapping[str, Any]) -> OwnRequest:
        """Send a completion, without waiting."""
        content = {"model": self._model, **body}
        return OwnRequest(self, self._url, json.dumps(content).encode())

    def give_up(self, why: str) -> None:
        """Send no further requests to it."""
        self.useless = True
        self.refused(why)

    def refused(self, why: str) -> None:
        """Log once that the server does not compute the requested tokens."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s cannot compute only the holes of a prompt (%s), so kvwire computes "
                'everything behind the first hole; check "http" in '
                "kv_connector_extra_config (this engine's URL) and VLLM_API_KEY (its "
                "key)",
                self._url,
                why,
            )


class OwnRequest:
    """A running completion."""

    def __init__(self, server: OwnServer, url: str, body: bytes) -> None:
        self.over: bool = False  # whether it has been answered or has failed
        self.answered: bool = False
        self._server = server
        self._body = body
        self._cancelled = False
        parts = urlsplit(url)
        kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            kind = http.client.HTTPSConnection
        assert parts.hostname is not None
        self._connection = kind(parts.hostname, parts.port, timeout=_CONNECT_S)
        threading.Thread(target=self._run, name="kvwire-hole", daemon=True).start()

    def cancel(self) -> None:
        """Close the request, so that vLLM aborts it."""
        self._cancelled = True
        self._shut()

    def _run(self) -> None:
        headers = {"content-type": "application/json", "connection": "close"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        connection = self._connection
        try:
            connection.connect()
            connection.sock.settimeout(None)
            if self._cancelled:
                return
            connection.request("POST", "/v1/completions", self._body, headers)
            answer = connection.getresponse()
            content = answer.read()
            self.answered = answer.status == http.HTTPStatus.OK
            if not self.answered and not self._cancelled:
                self._server.refused(f"HTTP {answer.status}: {content[:200]!r}")
        except (OSError, http.client.HTTPException) as exc:
            if not self._cancelled:
                self._server.refused(str(exc))
        finally:
            self.over = True
            connection.close()

    def _shut(self) -> None:
        # The thread waits for an answer, or closes the connection meanwhile.
        with contextlib.suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)
