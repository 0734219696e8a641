"""docs/reference/errors.md: the tree of errors."""

from __future__ import annotations

from collections.abc import Iterator

from kvwire import KVWireError
from tests.programs.reference import words


def page() -> str:
    rows = _rows(KVWireError, 0)
    return words.page("errors.md", words.table(("error", "", "to the peer"), rows))


def _rows(cls: type[KVWireError], depth: int) -> Iterator[tuple[str, str, str]]:
    own = "code" in cls.__dict__
    code = f"{cls.code.name} ({int(cls.code)})" if own else ""
    indent = "&emsp;" * depth
    yield f"{indent}{words.anchored(cls.__name__)}", words.purpose(cls), code
    for below in cls.__subclasses__():
        if below.__module__ == cls.__module__:
            yield from _rows(below, depth + 1)
