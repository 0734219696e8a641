"""docs/reference/errors.md: the tree of errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvwire import KVWireError
from tests.programs.reference.words import anchored, purpose, table

_INTRODUCTION: Final = """\
# Errors

`make reference` writes this page from the code. All exceptions that kvwire raises on
purpose are subclasses of `kvwire.KVWireError`; only the `timeout` of an `Engine`'s
calls raises a plain `TimeoutError`. `ConnectError` and `ListenError` are also an
`OSError`, `DeadlineExceeded` is also a `TimeoutError`, `UsageError` is also a
`ValueError`, and `NotAwaited` is also an `AttributeError`.

Retry on `RequestError`, reconnect on `ConnectionClosed`, change the call on
`UsageError`, look for a bug (or an attacker) on `ProtocolError`. A broken KV transfer
raises no error: its `Outcome` has the reason for each missing block.

The last column is the code that the peer gets, with one line of text for people.
"""


def page() -> str:
    return "\n".join(
        (_INTRODUCTION, table(("error", "", "to the peer"), _rows(KVWireError, 0)), "")
    )


def _rows(cls: type[KVWireError], depth: int) -> Iterator[tuple[str, str, str]]:
    own = "code" in cls.__dict__
    code = f"{cls.code.name} ({int(cls.code)})" if own else ""
    indent = "&emsp;" * depth
    yield f"{indent}{anchored(cls.__name__)}", purpose(cls), code
    for below in cls.__subclasses__():
        if below.__module__ == cls.__module__:
            yield from _rows(below, depth + 1)
