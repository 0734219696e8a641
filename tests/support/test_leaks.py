"""The leak check finds what leaks."""

from __future__ import annotations

import pytest

from tests.support.tree import ROOT

_INI = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
asyncio_debug = true
filterwarnings = error
"""
_PLUGINS = "--disable-plugin-autoload -p asyncio -p tests.support.leaks"

_LEAKY = """
import asyncio, os, socket, threading, time
import pytest

kept = []
over = threading.Event()

def test_descriptor():
    kept.append(open(os.devnull))

def test_socket_in_a_cycle():
    a, b = socket.socketpair()
    b.close()
    kept.append(a)

def test_thread():
    threading.Thread(target=over.wait, name="stray", daemon=True).start()

async def test_task():
    kept.append(asyncio.create_task(over_wait(), name="stray"))

async def over_wait():
    await asyncio.Event().wait()

async def test_error_nobody_retrieved():
    async def fail():
        raise RuntimeError("nobody asked")
    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    del task

async def test_callback_that_raises():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_every_leak_is_found(pytester: pytest.Pytester) -> None:
    """Each leaky test passes itself and fails at its end, naming what it left."""
    pytester.makefile(".ini", pytest=_INI)
    pytester.makepyfile(_LEAKY)
    result = pytester.runpytest_subprocess(*_PLUGINS.split())
    result.assert_outcomes(passed=6, errors=6)
    result.stdout.fnmatch_lines_random(
        [
            "  descriptor *: /dev/null",
            "  descriptor *: socket:*",
            "  thread 'stray'",
            "  <Task pending name='stray'*",
            "  Task exception was never retrieved: RuntimeError('nobody asked')",
            "  Exception in callback*ZeroDivisionError*",
        ]
    )
