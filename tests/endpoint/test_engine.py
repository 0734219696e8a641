"""An engine: from any thread, to any end, and gone without a trace."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import queue
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import kvwire
from kvwire import EngineIncoming, EngineOutgoing
from kvwire.endpoint.io_thread import called
from tests.support.caches import BLOCKS, LAYERS, Memory, same
from tests.support.interrupts import interrupts
from tests.support.pairs import SCHEMES, anywhere
from tests.support.waiting import PATIENCE_S

EVERY = list(range(BLOCKS))


@dataclass(frozen=True, slots=True)
class Engines:
    """A producer's engine and a consumer's, connected."""

    p: kvwire.Engine
    c: kvwire.Engine
    asking: kvwire.Connection
    offering: kvwire.Connection
    source: Memory
    target: Memory

    def begin(self, id: str) -> tuple[EngineOutgoing, EngineIncoming]:
        """Both ends of a pull."""
        out = self.p.publish(id, self.source.cache, EVERY)
        return out, self.c.pull(self.asking, id, self.target.cache, EVERY)


@contextmanager
def engines(scheme: str = "tcp") -> Iterator[Engines]:
    """Closed at the end, the consumer first."""
    with kvwire.Engine(name="prefill") as p, kvwire.Engine(name="decode") as c:
        asking = c.connect(p.listen(anywhere(scheme)))
        offering = p.run(p.communicator.accept(), timeout_s=PATIENCE_S)
        source = Memory()
        source.stamp(EVERY)
        yield Engines(p, c, asking, offering, source, Memory())


# --- transfers ------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("verb", ["pull", "push"])
def test_layer_by_layer(scheme: str, verb: str) -> None:
    with engines(scheme) as e:
        if verb == "pull":
            out, inc = e.begin("t")
        else:
            inc = e.c.expect("t", e.target.cache, EVERY)
            out = e.p.push(e.offering, "t", e.source.cache, EVERY)
        for layer in range(LAYERS):
            assert not inc.layer_landed(layer)
            out.ready(layers=layer)
            inc.wait_layer(layer, PATIENCE_S)
            assert inc.layer_landed(layer)
            assert same(e.source, EVERY, e.target, EVERY, [layer])
        assert not out.done()
        out.finish()
        for end in (inc, out):
            assert end.wait(PATIENCE_S).complete
            assert end.done()
            assert end.outcome is not None
            end.wait_drained(PATIENCE_S)
    # What is known stays known.
    assert inc.wait() is inc.outcome
    inc.wait_drained()
    inc.wait_layer(0)
    assert "over" in repr(out)


@pytest.mark.slow
def test_marks_from_several_threads_while_the_loop_is_busy() -> None:
    """Every mark counts once, whoever makes it; the last one need not come last."""
    with engines() as e, ThreadPoolExecutor(LAYERS + 1) as pool:
        busy = threading.Event()
        busy.set()

        def spin() -> None:
            if busy.is_set():
                e.p._thread.post(spin)

        spin()
        for number in range(25):
            out, inc = e.begin(f"t{number}")
            marks = [pool.submit(_mark_by_block, out, layer) for layer in range(LAYERS)]
            for mark in marks:
                mark.result(PATIENCE_S)
            out.finish()
            assert inc.wait(PATIENCE_S).complete
            assert same(e.source, EVERY, e.target, EVERY)
        busy.clear()


def _mark_by_block(out: EngineOutgoing, layer: int) -> None:
    for block in range(BLOCKS):
        out.ready(layers=layer, blocks=block)


def test_the_last_mark_and_the_commit_race_with_the_loop() -> None:
    """A commit never overtakes a mark that was made before it."""
    with engines("inproc") as e:
        for number in range(300):
            out, inc = e.begin(f"t{number}")
            for layer in range(LAYERS):
                out.ready(layers=layer)
            out.finish()
            assert inc.wait(PATIENCE_S).complete


def test_a_wait_that_takes_too_long_leaves_the_transfer_going() -> None:
    with engines() as e:
        out, inc = e.begin("t")
        out.ready(layers=0)
        inc.wait_layer(0, PATIENCE_S)
        for wait in (inc.wait, out.wait, inc.wait_drained, out.wait_drained):
            with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"):
                wait(0.01)
        with pytest.raises(TimeoutError):
            inc.wait_layer(1, 0.01)
        out.ready(layers=slice(1, None))
        out.finish()
        inc.wait_layer(1, PATIENCE_S)
        assert inc.wait(PATIENCE_S).complete
        assert out.wait(PATIENCE_S).complete
        inc.wait_drained(PATIENCE_S)
        out.wait_drained(PATIENCE_S)


def test_wrong_arguments_are_told_in_the_line_that_makes_them() -> None:
    with engines("inproc") as e:
        out, inc = e.begin("t")
        with pytest.raises(kvwire.UsageError, match="layers"):
            out.ready(layers=LAYERS)
        with pytest.raises(kvwire.UsageError, match=f"layer {LAYERS}"):
            inc.wait_layer(LAYERS)
        with pytest.raises(kvwire.UsageError, match="never marked"):
            out.finish()
        with pytest.raises(kvwire.UsageError, match="published already"):
            e.p.publish("t", e.source.cache, EVERY)
        out.finish(partial=True)
        assert inc.wait(PATIENCE_S).usable_prefix == 0


# --- connections ----------------------------------------------------------------------


def test_connections_say_who_is_there() -> None:
    """To any thread; what they do is for coroutines, and for the engine."""
    with engines() as e:
        assert e.asking.peer.name == "prefill"
        assert e.offering.peer.name == "decode"
        assert e.asking.transport == "tcp"
        assert e.asking.transport_report.taken == "tcp"
        assert "prefill" in repr(e.asking)
        assert "1 connections" in repr(e.p)
        with pytest.raises(kvwire.UsageError, match=r"engine\.run\(coroutine\)"):
            e.asking.pull("t", e.target.cache, EVERY)
        e.c.run(e.asking.close())
        pulled = e.c.pull(e.asking, "t", e.target.cache, EVERY)
        assert not pulled.wait().complete
        pulled.wait_drained()


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_a_peer_is_dialled_by_its_address(verb: str) -> None:
    with kvwire.Engine(name="prefill") as p, kvwire.Engine(name="decode") as c:
        source, target = Memory(), Memory()
        source.stamp(EVERY)
        if verb == "pull":
            where = str(p.listen(anywhere("tcp")))
            out = p.publish("t", source.cache, EVERY)
            inc = c.pull(where, "t", target.cache, EVERY)
        else:
            where = str(c.listen(anywhere("tcp")))
            inc = c.expect("t", target.cache, EVERY)
            out = p.push(where, "t", source.cache, EVERY)
        with out:
            out.ready()
        assert inc.wait(PATIENCE_S).complete
        assert same(source, EVERY, target, EVERY)


def test_errors_of_connect_keep_their_types() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        kvwire.Engine(profile={"model": "a"}) as one,
        kvwire.Engine(profile={"model": "b"}) as other,
    ):
        port = silent.getsockname()[1]
        with pytest.raises(kvwire.HandshakeTimeout):
            one.connect(f"127.0.0.1:{port}", timeout_s=1)
        silent.close()
        with pytest.raises(kvwire.ConnectError):
            one.connect(f"127.0.0.1:{port}")
        with pytest.raises(kvwire.ProfileMismatch, match="model"):
            one.connect(other.listen("127.0.0.1:0"))
        with pytest.raises(kvwire.BackendUnavailable):
            one.connect("nowhere://x:1")


# --- coroutines -----------------------------------------------------------------------


def test_anything_else_is_a_coroutine() -> None:
    """Messages, memory, members: with everything that a communicator can do."""
    with engines() as e:
        lent = bytearray(b"computed")

        async def lend() -> bytes:
            region = e.p.communicator.register(lent)
            await e.offering.send(1, region.grant(e.offering).to_bytes())
            return bytes(await e.offering.recv(2))

        async def take() -> bytes:
            grant = kvwire.Grant.from_bytes(bytes(await e.asking.recv(1)))
            into = bytearray(8)
            await e.asking.get(grant, into)
            await e.asking.send(2, b"thanks")
            return bytes(into)

        answer = e.p.start(lend())
        assert e.c.run(take(), timeout_s=PATIENCE_S) == b"computed"
        assert answer.result(PATIENCE_S) == b"thanks"


def test_accepts_that_take_too_long_lose_no_connection() -> None:
    """Every connection comes out of some accept, however many of them gave up."""
    count = 30
    with ExitStack() as stack:
        p = stack.enter_context(kvwire.Engine(name="prefill"))
        c = stack.enter_context(kvwire.Engine(name="decode"))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        accept = p.communicator.accept
        with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"):
            p.run(accept(), timeout_s=0.01)
        address = p.listen(anywhere("inproc"))
        connecting = pool.submit(lambda: [c.connect(address) for _ in range(count)])
        accepted = 0
        while accepted < count:
            try:
                p.run(accept(), timeout_s=0.0005)
            except TimeoutError:
                continue
            accepted += 1
        assert len(connecting.result(PATIENCE_S)) == count
        with pytest.raises(TimeoutError):
            p.run(accept(), timeout_s=0.01)


def test_a_coroutine_that_takes_too_long_has_ended() -> None:
    ended: list[bool] = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # it takes another turn to end
            ended.append(True)

    with kvwire.Engine() as engine:
        with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"):
            engine.run(slow(), timeout_s=0.01)
        assert ended == [True]


def test_a_cancelled_coroutine_is_no_closed_engine() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with kvwire.Engine() as engine, pytest.raises(concurrent.futures.CancelledError):
        engine.run(cancelled())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_is_for_its_caller_alone(kind: type[BaseException]) -> None:
    """Nobody else's work ends with it, and nobody waits for ever."""

    async def leave() -> None:
        raise kind("enough")

    with engines() as e:
        _, inc = e.begin("t")
        with pytest.raises(kind, match="enough"):
            e.c.run(leave())
        with pytest.raises(kind, match="enough"):
            e.c.start(leave()).result(PATIENCE_S)
        assert not inc.done()
        assert e.c.run(called(lambda: 3)) == 3


def test_an_exit_in_a_task_or_a_callback_does_not_end_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as ``free=`` of a transfer, which has no caller that could get it."""

    async def leave() -> None:
        raise SystemExit

    async def begin() -> None:
        left = asyncio.create_task(leave())
        await asyncio.wait([left])
        assert isinstance(left.exception(), SystemExit)

    with engines() as e:
        e.c.run(begin(), timeout_s=PATIENCE_S)
        out = e.p.publish("t", e.source.cache, EVERY)
        inc = e.c.pull(e.asking, "t", e.target.cache, EVERY, free=sys.exit)
        with out:
            out.ready()
        assert inc.wait(PATIENCE_S).complete
        inc.wait_drained(PATIENCE_S)
        again, pulled = e.begin("u")
        with again:
            again.ready()
        assert pulled.wait(PATIENCE_S).complete
    assert "kvwire-engine raised SystemExit(); the loop goes on" in caplog.text


def test_work_on_its_loop_is_not_waited_for() -> None:
    with engines() as e:
        begun, may_end = threading.Event(), threading.Event()

        async def work() -> str:
            begun.set()
            await asyncio.to_thread(may_end.wait, PATIENCE_S)
            return e.p.communicator.name

        name = e.p.start(work())
        assert begun.wait(PATIENCE_S)
        assert not name.done()
        may_end.set()
        assert name.result(PATIENCE_S) == "prefill"


@pytest.mark.parametrize("verb", ["run", "start"])
def test_work_that_is_no_coroutine_is_named(verb: str) -> None:
    with (
        kvwire.Engine() as engine,
        pytest.raises(kvwire.UsageError, match=f"{verb}: pass a coroutine.*not an int"),
    ):
        getattr(engine, verb)(5)


def test_no_work_for_a_closed_engine() -> None:
    async def work() -> None:
        raise AssertionError

    with kvwire.Engine() as engine:
        pass
    for verb in (engine.run, engine.start):
        with pytest.raises(kvwire.ClosedOK):
            verb(work())


@pytest.mark.parametrize("verb", ["send", "recv", "get"])
def test_an_interrupted_coroutine_may_wait_for_its_memory(verb: str) -> None:
    """Cancelled, it cancels its request; the interrupt arrives once all has ended."""
    free: list[str] = []

    with engines() as e:
        window = e.p.expose("kv", e.source.cache)
        remote = e.c.run(e.asking.window("kv"))
        ticket = window.offer([3])

        async def careful() -> None:
            verbs: dict[str, Callable[[], kvwire.Request[Any]]] = {
                "send": lambda: e.asking.send(1, bytes(5_000_000)),
                "recv": lambda: e.asking.recv(1, bytearray(8)),
                "get": lambda: remote.get(ticket, e.target.cache, [0]),
            }
            request = verbs[verb]()
            interrupt()
            try:
                await asyncio.Event().wait()
            finally:
                request.cancel()
                await request.released()
                free.append(verb)

        with interrupts() as interrupt, pytest.raises(KeyboardInterrupt):
            e.c.run(careful())
        assert free == [verb]


# --- the end --------------------------------------------------------------------------


def test_close_wakes_everybody_with_an_outcome() -> None:
    """Of both engines, whatever they wait for."""
    with engines() as e, ThreadPoolExecutor(8) as pool:
        out, inc = e.begin("t")
        out.ready(layers=0)
        inc.wait_layer(0, PATIENCE_S)
        outcomes = [pool.submit(end.wait) for end in (out, inc, inc)]
        drains = [pool.submit(end.wait_drained) for end in (out, inc)]
        layer = pool.submit(inc.wait_layer, 1)
        accept = pool.submit(e.c.run, e.c.communicator.accept())
        e.c.close()
        for outcome in outcomes:
            assert not outcome.result(PATIENCE_S).complete
        for drain in drains:
            drain.result(PATIENCE_S)
        assert isinstance(layer.exception(PATIENCE_S), kvwire.ClosedOK)
        assert isinstance(accept.exception(PATIENCE_S), kvwire.ClosedOK)
        assert len(inc.wait().missing) == BLOCKS
    # A forward pass may still be running.
    out.ready(layers=1)
    out.abort()
    inc.abort()
    with pytest.raises(kvwire.ClosedOK):
        e.p.publish("u", e.source.cache, EVERY)
    with pytest.raises(kvwire.ClosedOK):
        e.p.listen("127.0.0.1:0")
    assert repr(e.p) == "<Engine closed>"


def test_close_from_several_threads() -> None:
    with engines() as e, ThreadPoolExecutor(8) as pool:
        ends = [pool.submit(engine.close) for engine in (e.p, e.c) for _ in range(4)]
        for end in ends:
            end.result(PATIENCE_S)
        assert e.p._thread.ended


def test_a_block_left_by_an_exception_does_not_wait() -> None:
    """The peer hears no farewell, as from ``async with``."""
    with kvwire.Engine() as p:
        address = p.listen("127.0.0.1:0")
        with pytest.raises(ZeroDivisionError), kvwire.Engine() as c:  # noqa: PT012
            inc = c.pull(c.connect(address), "t", Memory().cache, EVERY)
            raise ZeroDivisionError
        assert not inc.wait().complete


def test_a_wrong_configuration_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(kvwire.UsageError, match="psk_file"):
        kvwire.Engine(trust="psk")
    with pytest.raises(kvwire.UsageError, match="did you mean"):
        kvwire.Engine(nmae="x")  # type: ignore[call-arg]
    assert threading.active_count() == before
    gc.collect()


def test_an_engine_nobody_has_any_more_ends() -> None:
    """It says so, since connections deserve a proper end."""
    ended: queue.Queue[bool] = queue.Queue()
    with pytest.warns(ResourceWarning, match="never closed"):
        _open_and_forget(ended)
    assert ended.get(timeout=PATIENCE_S)


def _open_and_forget(ended: queue.Queue[bool]) -> None:
    engine = kvwire.Engine()
    communicator = engine._communicator

    async def end() -> None:
        await communicator.close()
        ended.put(True)

    engine._thread.at_end(end, 10)
    del engine
    gc.collect()


def test_an_idle_engine_costs_nothing() -> None:
    """A second in which nothing happens; a poll of 1 ms takes some 20 ms of CPU."""
    with engines() as e:
        _, inc = e.begin("t")
        before_s = time.process_time()
        with pytest.raises(TimeoutError):
            inc.wait(1.0)
        assert time.process_time() - before_s < 0.1


def test_blocks_of_a_growing_transfer_are_named_from_any_thread() -> None:
    with engines() as e:
        tokens = len(EVERY) * e.source.cache.spec.block_tokens
        out = e.p.publish("t", e.source.cache, EVERY[:1], tokens=tokens, growing=True)
        inc = e.c.pull(e.asking, "t", e.target.cache, EVERY, tokens=tokens)
        out.ready(blocks=0)
        out.extend(EVERY[1:])
        out.ready(blocks=slice(1, len(EVERY)))
        out.finish()
        assert inc.wait(PATIENCE_S).complete
        assert same(e.source, EVERY, e.target, EVERY)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")
def test_its_thread_runs_on_the_cpus_it_is_given() -> None:
    async def allowed() -> set[int]:
        return os.sched_getaffinity(0)

    mine = os.sched_getaffinity(0)
    with kvwire.Engine(io_cpus=[max(mine)]) as engine:
        assert engine.run(allowed()) == {max(mine)}
    with kvwire.Engine() as engine:
        assert engine.run(allowed()) == mine
    assert os.sched_getaffinity(0) == mine


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")
def test_cpus_that_are_not_there_are_refused() -> None:
    threads = threading.active_count()
    with pytest.raises(kvwire.UsageError, match="io_cpus=1023: none of these CPUs is"):
        kvwire.Engine(io_cpus=[1023])
    assert threading.active_count() == threads


# --- windows --------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_of_a_window(scheme: str) -> None:
    """Offered and withdrawn from this thread; what was withdrawn is missing."""
    with engines(scheme) as e:
        window = e.p.expose("kv", e.source.cache)
        ticket = window.offer([3, 1])
        remote = e.c.run(e.asking.window("kv"))

        async def read(blocks: list[int]) -> kvwire.Outcome:
            return await remote.get(ticket, e.target.cache, blocks)

        assert e.c.run(read([0, 1])).complete
        assert same(e.source, [3, 1], e.target, [0, 1])
        window.withdraw([1])
        again = e.c.run(read([2, 3]), timeout_s=PATIENCE_S)
        assert sorted(again.landed) == [("kv", 2)]
        assert sorted(again.missing) == [("kv", 3)]
        e.c.run(remote.close())
        e.p.run(window.close())


def test_a_window_from_many_threads() -> None:
    """Offers, withdrawals and gets at once: each get has what its ticket named."""
    with engines() as e:
        window = e.p.expose("kv", e.source.cache)
        remote = e.c.run(e.asking.window("kv"))

        async def read(ticket: bytes, target: Memory) -> kvwire.Outcome:
            return await remote.get(ticket, target.cache, [0])

        def turn(block: int) -> bool:
            for _ in range(20):
                target = Memory()
                outcome = e.c.run(read(window.offer([block]), target))
                if not (outcome.complete and same(e.source, [block], target, [0])):
                    return False
                window.withdraw([block])
            return True

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(turn, range(4)))


# --- blocks ---------------------------------------------------------------------------


def test_a_block_keeps_its_error_if_the_engine_is_closed() -> None:
    """And ends without one if it has none."""
    with engines() as e:
        _, inc = e.begin("t")
        e.c.close()
        with pytest.raises(ZeroDivisionError), inc:
            raise ZeroDivisionError
        with inc:
            assert e.c.communicator.closed


def test_blocks_of_transfers() -> None:
    with engines() as e:
        out, inc = e.begin("t")
        with out:
            out.ready()
            out.renew_lease()
        with inc:
            assert inc.wait(PATIENCE_S).complete
            assert inc.met
            assert inc.carries
        assert inc.is_drained
        assert (out.id, inc.id) == ("t", "t")
        out, inc = e.begin("half")
        with pytest.raises(kvwire.UsageError, match="never marked"), out:
            out.ready(layers=0)
        with inc:
            inc.abort("not wanted")
        assert inc.is_drained
        out, inc = e.begin("failed")
        with pytest.raises(ZeroDivisionError), out:
            raise ZeroDivisionError
        assert "ZeroDivisionError in the producer" in str(inc.wait(PATIENCE_S).missing)


def test_an_engine_that_is_aborted_says_so() -> None:
    with engines() as e:
        assert e.p.communicator.name == "prefill"
        e.c.abort()

        async def receive() -> None:
            await e.offering.recv(1)

        with pytest.raises(kvwire.ConnectionClosed):
            e.p.run(receive(), timeout_s=PATIENCE_S)
        assert not e.p.communicator.closed
    assert e.p.communicator.closed


@pytest.mark.parametrize(
    ("module", "asks"),
    [("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched")],
)
@pytest.mark.parametrize("replaced", [True, False])
def test_a_program_whose_threads_are_none_is_refused_by_name(
    module: str, asks: str, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of its thread would never get a turn, and the constructor never end."""
    patcher = types.ModuleType(module)
    setattr(patcher, asks, lambda name: replaced and name in {"threading", "thread"})
    monkeypatch.setitem(sys.modules, module, patcher)
    if not replaced:
        with kvwire.Engine() as engine:
            assert engine.listen("127.0.0.1:0").port
        return
    library = module.partition(".")[0]
    with pytest.raises(kvwire.UsageError, match=rf"^{library} .*thread=False"):
        kvwire.Engine()
