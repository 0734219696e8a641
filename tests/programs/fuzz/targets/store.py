"""What a store server and its clients read of each other.

The first byte says who reads; the rest is the message.
"""

from __future__ import annotations

from kvwire.errors import UsageError
from kvwire_store.limits import STORE_KEYS_MAX
from kvwire_store.namespace import ORDERS
from kvwire_store.server import messages


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
    request = messages.decode_request(said)
    assert messages.decode_request(messages.encode(request)) == request
    if isinstance(request, messages.Find | messages.Touch | messages.TransferMessage):
        keys = request.names.keys_of("")
        assert 0 < len(keys) == len(request.names) <= STORE_KEYS_MAX
        assert {len(key) for key in keys} == {request.names.width}
    if isinstance(request, messages.TransferMessage):
        request.names.all_in(messages.namespace_in(request.namespace))
    if isinstance(request, messages.Put):
        assert 0 <= request.order < len(ORDERS)


def _reply(said: bytes) -> None:
    reply = messages.decode_reply(said)
    assert messages.decode_reply(messages.encode(reply)) == reply
    if isinstance(reply, messages.Found | messages.StoreDone):
        assert len(reply.table) <= STORE_KEYS_MAX
    if isinstance(reply, messages.Welcome):
        for text in reply.namespaces:
            messages.namespace_told(text)
