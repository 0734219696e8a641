"""What a store server and its clients read of each other.

The first byte says who reads; the rest is the message.
"""

from __future__ import annotations

from kvwire.errors import UsageError
from kvwire.limits import STORE_KEYS_MAX
from kvwire.store.server.messages import (
    Find,
    Found,
    StoreDone,
    Touch,
    TransferMessage,
    Welcome,
    decode_reply,
    decode_request,
    encode,
)


def run(data: bytes) -> int:
    """A message is refused, or written again as it was understood."""
    said = data[1:]
    try:
        if data[:1] < b"\x80":
            _request(said)
        else:
            _reply(said)
    except UsageError:
        return len(data)
    return len(data)


def _request(said: bytes) -> None:
    request = decode_request(said)
    assert decode_request(encode(request)) == request
    if isinstance(request, Find | Touch | TransferMessage):
        assert len(request.names.keys_of("")) == len(request.names)
    if isinstance(request, TransferMessage):
        request.names.all_in(request.namespace.namespace())


def _reply(said: bytes) -> None:
    reply = decode_reply(said)
    assert decode_reply(encode(reply)) == reply
    if isinstance(reply, Found | StoreDone):
        assert len(reply.table) <= STORE_KEYS_MAX
    if isinstance(reply, Welcome):
        for text in reply.namespaces:
            text.namespace()
