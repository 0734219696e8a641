"""A store server under engines, as a process that can be killed and started again."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from kvwire.config import Config
from kvwire.errors import KVWireError
from kvwire_store.server.client import ask_report
from packages.vllm.tests.support.serving import Process
from tests.support.servers import free_port
from tests.support.waiting import eventually


class StoreServer:
    def __init__(
        self,
        folder: Path,
        memory: str = "64MiB",
        disk: str = "256MiB",
        *more: str,
        name: str = "kv",
    ) -> None:
        self.http = f"http://127.0.0.1:{free_port()}"
        self.address = f"127.0.0.1:{free_port()}"
        self._process = Process(
            [
                *(sys.executable, "-m", "kvwire", "store", "serve"),
                *("--listen", self.address, "--tier", f"memory:{memory}"),
                *("--tier", f"disk:{folder / name}?size={disk}"),
                *("--metrics", self.http.removeprefix("http://"), *more),
            ],
            folder / f"{name}.log",
            "",
        )
        self.restart()

    def kill(self) -> None:
        self._process.kill()

    def pause(self, *, on: bool = True) -> None:
        """Have it stand still, or go on."""
        running = self._process.running
        assert running is not None
        running.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def restart(self) -> None:
        """Kill it, and start it again on what is on its disk."""
        self.kill()
        self._process.start()
        assert eventually(self._answers), self._process.tail()

    def _answers(self) -> bool:
        try:
            return self.blocks() >= 0
        except KVWireError:
            return False

    def blocks(self) -> int:
        report = asyncio.run(ask_report(self.address, Config()))
        return report.tiers[-1].stats.blocks or 0
