"""That no engine outlives the program that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import sys, threading
from pathlib import Path
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import Process

class Deaf(Process):
    def wait(self): pass

server = Deaf(["sleep", "1000"], Path(sys.argv[1]), "")
with running(server):
    print(server.running.pid, flush=True)
    threading.Event().wait()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups")
def test_a_program_that_is_ended_ends_its_servers(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    with program:
        assert program.stdout is not None
        server = int(program.stdout.readline())
        program.send_signal(signal.SIGTERM)
        assert program.wait() == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(server, 0)
