"""The loopback harness: one line, two connected communicators, nothing left over."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import kvwire
from kvwire.testing import Loopback, loopback
from kvwire.testing.faults import FaultPlan
from tests.support.depth import parameters
from tests.support.runs import python
from tests.support.tree import ROOT

BACKENDS = ("inproc", "tcp")


async def chat(pair: Loopback) -> int:
    """Send 50 messages, one after the other; how many arrived."""
    for number in range(50):
        await pair.ab.send(1, b"%d" % number)
        assert await pair.ba.recv(1, deadline=0.1) == b"%d" % number
    return number + 1


@pytest.mark.parametrize("backend", BACKENDS)
async def test_both_ends_of_one_connection(backend: str) -> None:
    async with loopback(backend) as pair:
        assert isinstance(pair, Loopback)
        assert pair.a.name == pair.ba.peer.name == "a"
        assert pair.b.name == pair.ab.peer.name == "b"
        assert pair.ab.transport == pair.ba.transport == backend
        assert pair.address.scheme == backend
        await pair.ab.send(7, b"there")
        assert await pair.ba.recv(7) == b"there"
        await pair.ba.send(7, b"and back")
        assert await pair.ab.recv(7) == b"and back"
    assert pair.ab.closed
    assert pair.ba.closed


async def test_configuration_is_that_of_both() -> None:
    config = kvwire.Config(profile={"model": "toy"}, message_bytes=8)
    async with loopback(config=config, eager_bytes=0) as pair:
        for communicator in (pair.a, pair.b):
            assert communicator.config.profile == {"model": "toy"}
            assert communicator.config.message_bytes == 8
            assert communicator.config.eager_bytes == 0


async def test_an_exception_aborts_and_goes_on() -> None:
    with pytest.raises(ZeroDivisionError):
        async with loopback() as pair:
            1 / 0  # noqa: B018 - raises
    with pytest.raises(kvwire.ConnectionLost):
        await pair.ab.send(1, b"x")


async def test_faults_befall_what_is_sent() -> None:
    """A link that dies after 20 frames ends the connection, and the block ends too."""
    plan = FaultPlan(seed=1, kill=1.0, kill_after=20)
    async with loopback(faults=plan) as pair:
        with pytest.raises(kvwire.ConnectionLost, match="killed by its fault plan"):
            await chat(pair)


async def test_a_stalled_link_does_not_keep_the_end_waiting() -> None:
    plan = FaultPlan(seed=1, stall=1.0, stall_after=10)
    async with loopback(faults=plan, close_timeout_s=3600) as pair:
        with pytest.raises(kvwire.DeadlineExceeded):
            await chat(pair)


async def test_the_plan_is_in_force_for_this_pair_only() -> None:
    plan = FaultPlan(seed=1, kill=1.0, kill_after=20)
    async with loopback(faults=plan), loopback() as sound:
        assert await chat(sound) == 50


async def test_a_handshake_that_faults_have_hit_is_an_error() -> None:
    with pytest.raises(kvwire.ConnectionLost):
        async with loopback(faults=FaultPlan(seed=1, kill=1.0)):
            pytest.fail("connected over a dead link")


async def test_other_backends_have_no_faults() -> None:
    with pytest.raises(kvwire.UsageError, match="only inproc injects faults"):
        async with loopback("tcp", faults=FaultPlan(seed=1)):
            pytest.fail("took a plan that nothing follows")


# --- the fixtures, in runs of pytest that have nothing but the installed plugin -------


_PAIR = """
async def test_messages(kvwire_pair):
    await kvwire_pair.ab.send(1, b"hello")
    assert await kvwire_pair.ba.recv(1) == b"hello"
"""


def run_pytest(
    folder: Path,
    test: str,
    *arguments: str,
    before: str = "pass",
    settings: str = "asyncio_default_fixture_loop_scope = function",
) -> subprocess.CompletedProcess[str]:
    """Run a test file the way a user's repository does, warnings being errors."""
    (folder / "test_it.py").write_text(test)
    (folder / "pytest.ini").write_text(f"[pytest]\n{settings}\n")
    program = f"import sys; {before}; import pytest; sys.exit(pytest.main())"
    return python("-c", program, "-q", "-W", "error", *arguments, cwd=folder)


async def test_the_fixture_is_here_as_well(kvwire_pair: Loopback) -> None:
    await kvwire_pair.ab.send(1, b"hello")
    assert await kvwire_pair.ba.recv(1) == b"hello"


@pytest.mark.parametrize("mode", parameters(["auto", "strict"], every=2))
def test_a_pair_in_both_modes_of_pytest_asyncio(mode: str, tmp_path: Path) -> None:
    marked = f"import pytest\npytestmark = pytest.mark.asyncio\n{_PAIR}"
    done = run_pytest(tmp_path, marked, "--asyncio-mode", mode)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_a_fixture_on_another_loop_than_its_test_names_the_setting(
    tmp_path: Path,
) -> None:
    settings = "asyncio_mode = auto\nasyncio_default_fixture_loop_scope = session"
    done = run_pytest(tmp_path, _PAIR, settings=settings)
    assert "a test and its fixtures need one loop (pytest-asyncio:" in done.stdout


def test_the_block_of_the_page_runs_in_a_fresh_project(tmp_path: Path) -> None:
    """In the mode that pytest-asyncio has without settings."""
    page = (ROOT / "docs" / "howto" / "test-your-server.md").read_text()
    (block,) = (b for b in page.split("```python\n")[1:] if "kvwire_pair" in b)
    done = run_pytest(tmp_path, block.partition("```")[0])
    assert "3 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_the_backend_is_a_parameter(tmp_path: Path) -> None:
    test = """
import pytest

@pytest.mark.parametrize("kvwire_backend", ["inproc", "tcp"], indirect=True)
async def test_it(kvwire_pair, kvwire_backend):
    assert kvwire_pair.ab.transport == kvwire_backend
"""
    done = run_pytest(tmp_path, test, "--asyncio-mode", "auto")
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_a_run_that_uses_no_fixture_does_not_import_kvwire(tmp_path: Path) -> None:
    test = """
import sys

def test_it():
    assert "kvwire.testing.pytest_plugin" in sys.modules
    assert "numpy" not in sys.modules
    assert "kvwire.communicator" not in sys.modules
    assert "kvwire.testing.harness" not in sys.modules
"""
    done = run_pytest(tmp_path, test)
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_the_plugin_does_without_pytest_asyncio(tmp_path: Path) -> None:
    """It is loaded wherever kvwire is installed, whatever runs the async tests."""
    test = "def test_it(kvwire_backend):\n    assert kvwire_backend == 'inproc'\n"
    hidden = (
        "import os; os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'; "
        "sys.modules['pytest_asyncio'] = None"
    )
    plugin = "kvwire.testing.pytest_plugin"
    done = run_pytest(tmp_path, test, "-p", plugin, before=hidden, settings="")
    assert "1 passed" in done.stdout, done.stdout
