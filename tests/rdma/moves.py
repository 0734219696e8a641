"""What tests of two hosts share: an owner that serves, a reader, what both printed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.rdma.hosts import MOVER, Host

MIB = 16


@contextmanager
def serving(first: Host, options: str) -> Iterator[None]:
    """An owner, whom nothing but the end of the block ends; readers wait for it."""
    first.start("owner", f"{MOVER} serve {options}")
    try:
        yield
        first.stop("owner", "TERM")
        first.wait_for("owner", "rig-status 0")
    finally:
        first.stop("owner", "KILL")


@contextmanager
def half_way(hosts: tuple[Host, Host], options: str = "") -> Iterator[None]:
    """A reader that has half of a transfer, and an owner that then sends the rest."""
    first, second = hosts
    second.start("reader", f"{MOVER} pull --hold --mib {MIB} {options}")
    second.wait_for("reader", "half of 0")
    first.stop("owner", "USR1")
    yield
    second.wait_for("reader", "rig-status 0")


def pulled(printed: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The transfers, and what they came to: no byte is wrong, and none came late."""
    lines = printed.splitlines()
    transfers = [json.loads(line) for line in lines if line.startswith("{")]
    found = [line for line in lines if line.startswith("summary ")]
    assert found, f"the reader came to no end:\n{printed}"
    summary = json.loads(found[0].removeprefix("summary "))
    assert summary["wrong"] == 0
    assert summary["late"] == 0
    return transfers, summary
