"""Checks of the arguments of messages, puts and gets."""

from __future__ import annotations

from typing import Any, Final

from kvwire.errors import UsageError, wrong_type
from kvwire.limits import REQUEST_BYTES_MAX
from kvwire.types import Grant, whole

TAG_MAX: Final = 2**64 - 1


def checked_tag(tag: Any) -> int:
    """Return a tag as a plain int.

    Raises:
        UsageError: The tag is not an integer, or is out of range.
    """
    number = whole(tag)
    if number is None or not 0 <= number <= TAG_MAX:
        raise UsageError(f"tag={tag!r:.80}: pass an integer from 0 to 2**64 - 1")
    return number


def check_size(nbytes: int) -> None:
    """Refuse memory of more bytes than one request may move.

    Raises:
        UsageError: It has more.
    """
    if nbytes > REQUEST_BYTES_MAX:
        raise UsageError(
            f"{nbytes} bytes are too many for one request; the limit is "
            f"{REQUEST_BYTES_MAX}"
        )


def check_grant(grant: Any, nbytes: int, connection: bytes) -> None:
    """Refuse a grant for other memory, or for another connection.

    Args:
        grant: The grant of a put or get.
        nbytes: The size of the caller's memory.
        connection: The digest of the connection that is asked.

    Raises:
        UsageError: It is not a grant for this connection and this number of bytes.
    """
    if not isinstance(grant, Grant):
        raise wrong_type("grant", grant, "a kvwire.Grant of the peer")
    if grant.connection != connection:
        raise UsageError(
            f"this grant was made for connection {grant.connection.hex()[:8]}, "
            f"not for this one ({connection.hex()[:8]}): ask the peer for a new grant"
        )
    if nbytes != grant.nbytes:
        raise UsageError(
            f"the buffer has {nbytes} bytes and the grant has {grant.nbytes}; "
            "pass grant[a:b] of the same length"
        )
    if nbytes > REQUEST_BYTES_MAX:
        check_size(nbytes)
