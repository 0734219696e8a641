"""The leak check finds what leaks, and only that; both loops run."""

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

_CLEAN = """
import asyncio, socket, threading
import pytest

@pytest.fixture
async def served():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()

@pytest.fixture(scope="module")
def kept():
    with socket.socket() as sock:
        yield sock

async def test_server_of_a_fixture(served):
    reader, writer = await asyncio.open_connection(*served)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()

async def test_executor():
    assert await asyncio.get_running_loop().run_in_executor(None, int) == 0

def test_socket_of_the_module(kept):
    assert kept.fileno() > 0

def test_thread_on_its_way_out():
    threading.Thread(target=int).start()

def test_asyncio_run():
    async def main():
        return await asyncio.to_thread(int)
    assert asyncio.run(main()) == 0

async def test_cancelled_and_awaited():
    task = asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
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


def test_nothing_else_is_found(pytester: pytest.Pytester) -> None:
    """Fixtures, executors and joined tasks are not leaks, on either loop."""
    pytester.makefile(".ini", pytest=_INI)
    pytester.makepyfile(_CLEAN)
    both = "-p", "tests.support.loops", "--loops", "asyncio,uvloop"
    result = pytester.runpytest_subprocess(*_PLUGINS.split(), *both)
    result.assert_outcomes(passed=2 * 3 + 3)


def test_a_callback_that_blocks_is_named(pytester: pytest.Pytester) -> None:
    """The list after the run says which test held the loop; the test still passes."""
    pytester.makefile(".ini", pytest=_INI)
    pytester.makepyfile(
        """
        import time
        async def test_blocks():
            time.sleep(0.2)
        """
    )
    both = "-p", "tests.support.loops", "--loops", "asyncio,uvloop"
    result = pytester.runpytest_subprocess(*_PLUGINS.split(), *both)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*callbacks over 50 ms*", "*ms*test_blocks?asyncio?"])
