"""Processes that end, or fork, with an engine in them.

Each test is a program of its own: what matters is its exit status, its output, and that
it ends at all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.depth import parameters
from tests.support.runs import python

# Two interpreters start within it, also on a busy machine.
TIMEOUT_S = 300
BEGIN = """
import os, sys, threading, warnings
import numpy as np
import kvwire
from tests.support.caches import BLOCKS, Memory

every = list(range(BLOCKS))
source, target = Memory(), Memory()
p, c = kvwire.Engine(name="p"), kvwire.Engine(name="c")
asking = c.connect(p.listen("127.0.0.1:0"))
out = p.publish("t", source.cache, every)
inc = c.pull(asking, "t", target.cache, every)
out.ready(layers=0)
inc.wait_layer(0, 10)
"""


def _run(program: str) -> str:
    """What a program prints; it must end well and complain about nothing."""
    done = python(
        "-W", "error", "-c", BEGIN + textwrap.dedent(program), timeout=TIMEOUT_S
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


def test_exit_without_close() -> None:
    """With a transfer in flight and a thread that waits for it."""
    out = _run(
        """
        threading.Thread(target=inc.wait, daemon=True).start()
        print("last line")
        """
    )
    assert out == "last line\n"


@pytest.mark.slow
def test_exit_of_the_interpreter_ends_connections_properly() -> None:
    """The peer learns that it was meant, and not that a process died."""
    out = _run(
        """
        import atexit
        atexit.register(lambda: print(out.outcome.complete, p._thread.ended))
        """
    )
    assert out == "False True\n"


def test_exit_while_threads_wait() -> None:
    """Threads that the interpreter joins, each in another wait: all of them end."""
    out = _run(
        """
        from concurrent.futures import ThreadPoolExecutor

        import atexit, socket
        mute = socket.create_server(("127.0.0.1", 0))  # connects, and says nothing
        atexit.register(mute.close)

        def until_it_ends(wait):
            try:
                wait()
            except kvwire.KVWireError:
                pass

        waits = [
            inc.wait, lambda: inc.wait_layer(1), inc.wait_drained, out.wait,
            lambda: p.run(p.communicator.accept()),
            lambda: c.connect("127.0.0.1:%d" % mute.getsockname()[1]),
            lambda: c.run(asking.close()), c.close,
        ]
        # Of a pool too, which concurrent.futures ends at the exit.
        pool = ThreadPoolExecutor(2)
        pool.submit(until_it_ends, waits[0]), pool.submit(until_it_ends, waits[4])
        for wait in waits:
            threading.Thread(target=until_it_ends, args=[wait]).start()
        print("last line")
        """
    )
    assert out == "last line\n"


@pytest.mark.parametrize(
    "state", parameters(["runs", "main waits", "closing", "closed"], every=4)
)
def test_exit_by_a_signal(state: str) -> None:
    """SIGINT in the middle of each state: the process ends, as Python ends by it."""
    program = {
        "runs": "print('now', flush=True); sys.stdin.read()",
        "main waits": "print('now', flush=True); inc.wait()",
        "closing": (
            "p._thread.at_end(lambda: print('now', flush=True) or stuck(), 30);"
            "p.close()"
        ),
        "closed": "p.close(), c.close(); print('now', flush=True); sys.stdin.read()",
    }[state]
    stuck = "import asyncio\nasync def stuck(): await asyncio.sleep(1)\n"
    waiting = "threading.Thread(target=inc.wait).start()\n"
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + stuck + waiting + program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "now\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT, said
    assert "KeyboardInterrupt" in said
    assert "Fatal" not in said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_cannot_use_it_and_can_make_its_own() -> None:
    """Nothing of the parent's is touched by the child, whatever it tries."""
    out = _run(
        """
        warnings.simplefilter("ignore")  # of forking with threads, which is the point

        def refused(call):
            try:
                call()
            except kvwire.UsageError as exc:
                return "fork" in str(exc)

        child = os.fork()
        if not child:
            calls = [
                inc.wait, inc.wait_drained, lambda: inc.wait_layer(1),
                lambda: out.ready(layers=1), out.finish, out.abort, inc.abort,
                asking.abort, lambda: p.listen("127.0.0.1:0"),
                lambda: c.run(asking.close()),
                lambda: p.publish("u", source.cache, every),
                lambda: c.pull(asking, "u", target.cache, every),
            ]
            print([refused(call) for call in calls] == [True] * len(calls))
            p.close()
            with kvwire.Engine(name="p2") as p2, kvwire.Engine(name="c2") as c2:
                own = p2.publish("t", source.cache, every)
                got = c2.pull(
                    c2.connect(p2.listen("127.0.0.1:0")), "t", target.cache, every
                )
                own.ready()
                own.finish()
                print(got.wait(10).complete)
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        out.ready(layers=slice(1, None))
        out.finish()
        print(inc.wait(10).complete)
        p.close(), c.close()
        """
    )
    assert out.split() == ["True", "True", "0", "True"]
