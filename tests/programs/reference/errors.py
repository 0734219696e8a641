"""docs/reference/errors.md: the tree of errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvwire import KVWireError
from tests.programs.reference.words import anchored, purpose, table

_INTRODUCTION: Final = """\
# Errors

Written from the code by `make reference`. Everything kvwire raises on purpose is below
`kvwire.KVWireError`; the `timeout` of an `Engine`'s calls is a `TimeoutError` alone.
`ConnectError` and `ListenError` are an `OSError` as well, `DeadlineExceeded` is a
`TimeoutError`, and `UsageError` a `ValueError`.

Retry on `RequestError`, reconnect on `ConnectionClosed`, change the call on
`UsageError`, look for a bug (or an attacker) on `ProtocolError`. A transfer of KV
blocks that breaks is no error but an `Outcome`, with the reason for each block.

A peer gets the number, and one line of text that is never interpreted.
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
