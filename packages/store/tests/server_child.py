"""A store server in a process of its own, which a test can kill, stop and continue."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tests.support.runs import Beside, beside


class ServerProcess(Beside):
    port: int
    # The line with its address, and what it has logged before that.
    said: str
    logged: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"kvwire://127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def serving(*arguments: str, port: int = 0) -> AsyncIterator[ServerProcess]:
    """Run ``kvwire store serve`` with some arguments, and kill it at the end."""
    command = ("-m", "kvwire", "store", "serve", "--listen", f"127.0.0.1:{port}")
    async with beside(*command, *arguments, kind=ServerProcess, logs=True) as made:
        logged: list[str] = []
        while not (said := await made.line()).startswith("serving"):
            logged.append(said)
        address = said.partition(" on ")[2].partition(";")[0]
        made.port = int(address.rpartition(":")[2])
        made.said, made.logged = said, tuple(logged)
        yield made
