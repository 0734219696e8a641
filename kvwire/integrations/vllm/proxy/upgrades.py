"""Requests that offer another protocol, as clients in Java do: ``Upgrade: h2c``.

A server may pass an offer by. httptools takes all that follows for that protocol's, and
the request comes without its body (uvicorn's issue 2722). So h11 reads the connection
from there on.
"""

from __future__ import annotations

from typing import Final

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_OFFERS: Final = (b"upgrade", b"http2-settings")


class PassingByProtocol(HttpToolsProtocol):
    """Reads requests with httptools, and those that offer another protocol with h11."""

    def data_received(self, data: bytes) -> None:
        """Read what has come."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            self._go_on_with_h11(data[offer.args[0] :])
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _should_upgrade(self) -> bool:
        return True  # so that nothing is begun of a request with an offer

    def _go_on_with_h11(self, rest: bytes) -> None:
        # The cycle is None before the first request.
        if not getattr(self.cycle, "response_complete", True):
            self.transport.close()  # it has come before the answer to another one
            return
        self.connections.discard(self)
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name not in _OFFERS:
                head += [name, b": ", value, b"\r\n"]
        protocol = H11Protocol(self.config, self.server_state, self.app_state)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(b"".join((*head, b"\r\n", rest)))
