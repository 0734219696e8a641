"""redis-server: what a cache of KV blocks is often kept in, beside a store server.

It keeps everything in memory and writes nothing to a disk. What drives it is
:mod:`tests.bench.redis_solo`.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from kvwire.cli.bench.case import Missing
from kvwire.cli.bench.errors import BenchError
from kvwire.cli.bench.solo import SoloContender
from tests.bench.iperf3 import HOST, free_port
from tests.bench.sides import PROGRAM as PROGRAM_OF_SIDES

PROGRAM: Final = "redis-server"
INSTALL: Final = "apt-get install redis-server, or brew install redis"
_READY: Final = "Ready to accept connections"
_TIMEOUT_S: Final = 10.0


def missing() -> Missing | None:
    """What to do if redis-server is not installed; None if it is."""
    return None if shutil.which(PROGRAM) else Missing(PROGRAM, INSTALL)


class RedisContender(SoloContender):
    """A server, and one process that puts blocks there and gets them back."""

    _server: subprocess.Popen[str] | None = None

    def __init__(self) -> None:
        super().__init__("redis", "store-redis", program=PROGRAM_OF_SIDES)

    def start(self) -> None:
        """See Contender."""
        port = free_port()
        self.options = [f"port={port}"]
        self._server = subprocess.Popen(
            _command(port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._server.stdout is not None
        said = ""
        for line in self._server.stdout:
            said = line.strip() or said
            if _READY in line:
                super().start()
                return
        raise BenchError(f"{PROGRAM} ended: {said}")

    def stop(self) -> None:
        """See Contender."""
        super().stop()
        if self._server is None:
            return
        self._server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(_TIMEOUT_S)
        assert self._server.stdout is not None
        self._server.stdout.close()
        self._server = None


def _command(port: int) -> Sequence[str]:
    return [
        *(shutil.which(PROGRAM) or PROGRAM, "--bind", HOST, "--port", str(port)),
        *("--save", "", "--appendonly", "no"),
    ]
