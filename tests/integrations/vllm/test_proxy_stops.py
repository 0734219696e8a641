"""How the proxy ends, as a process: Ctrl-C and SIGTERM, whatever is under way."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROXY = "kvwire.integrations.vllm.proxy"
DECODE = ("--decode", "http://127.0.0.1:9=127.0.0.1:9", "--port", "0")


@pytest.mark.parametrize("module", [f"{PROXY}.engines", "uvicorn", "uvicorn.lifespan"])
def test_ctrl_c_while_it_starts(module: str) -> None:
    """The signal ends it, as shells expect it, and nothing is said."""
    code = (
        "import os, runpy, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(name, *_):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts)\n"
        f"runpy.run_module({PROXY!r}, run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *DECODE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
