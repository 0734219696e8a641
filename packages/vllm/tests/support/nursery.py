"""vLLM engines that start in seconds, as forks of a process that has imported vLLM.

An engine needs half a minute of a core to start, and most of it to import the same
modules twice: in the API server, and in the engine core that it starts. A nursery
imports them once. It reads the commands of engines, one JSON object a line, and answers
with a process id for each. What runs in such a process is vLLM's own API server, in a
process group of its own, and it ends with the nursery.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Self

from packages.vllm.tests.support.serving import Process

_API_SERVER: Final = "vllm.entrypoints.openai.api_server"
# What an API server and an engine core import, at last.
_MODULES: Final = (
    _API_SERVER,
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.utils",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "kvwire_vllm.store",
    "kvwire_vllm.store.scheduler",
    "kvwire_vllm.store.worker",
)


class Fork:
    """An engine that a nursery has started; it is used as a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit status, which is 0 however it ended; None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended."""
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        if self._ended >= 0:
            signal.pidfd_send_signal(self._ended, number)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self._ended >= 0:
            if not select.select([self._ended], [], [], timeout_s)[0]:
                return None
            os.close(self._ended)
            self._ended = -1
        return 0


class Nursery:
    """Starts engines as forks; a context."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # or a signal for us would end it before its forks
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(self, one: Process) -> Fork:
        """Start an engine."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "command": one.command,
            "environment": one.environment,
            "log": str(one.log),
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Fork(int(self._process.stdout.readline()))


def main() -> None:
    """Import vLLM, and start engines until the input ends; then end them all."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed at an import is no answer
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    pids = []
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            answers.close()
            _become(**asked)
        pids.append(pid)
        print(pid, file=answers, flush=True)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _become(command: Sequence[str], environment: dict[str, str], log: str) -> None:
    """Be an engine, in a process that has just been forked."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, fd in ((0, null), (1, out), (2, out)):
        os.dup2(fd, number)
    os.environ.update(environment)
    at = command.index(_API_SERVER)
    sys.argv = [*command[at:]]
    began = time.monotonic()
    status = 1
    try:
        # It was done at the import, without this engine's environment.
        importlib.import_module("vllm.logger")._configure_vllm_root_logger()
        engines: Any = importlib.import_module("vllm.v1.engine.utils")
        # On CPUs vLLM starts an engine core with imports of its own.
        engines.get_mp_context = lambda: multiprocessing.get_context("fork")
        entry: Any = importlib.import_module(_MODULES[1])
        entry.main()
        status = 0
    finally:
        print(f"ran {time.monotonic() - began:.0f} s", flush=True)
        os._exit(status)


if __name__ == "__main__":
    main()
