"""An engine: from any thread, to any end, and gone without a trace."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire import EngineConnection, EngineIncoming, EngineOutgoing
from tests.support.caches import BLOCKS, LAYERS, Memory, same
from tests.support.interrupts import interrupts
from tests.support.pairs import SCHEMES, anywhere
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import PATIENCE_S

EVERY = list(range(BLOCKS))


@dataclass(frozen=True, slots=True)
class Engines:
    """A producer's engine and a consumer's, connected."""

    p: kvwire.Engine
    c: kvwire.Engine
    asking: EngineConnection
    offering: EngineConnection
    source: Memory
    target: Memory

    def begin(self, id: str) -> tuple[EngineOutgoing, EngineIncoming]:
        """Both ends of a pull."""
        out = self.p.publish(id, self.source.cache, EVERY)
        return out, self.asking.pull(id, self.target.cache, EVERY)


@contextmanager
def engines(scheme: str = "tcp") -> Iterator[Engines]:
    """Closed at the end, the consumer first."""
    with kvwire.Engine(name="prefill") as p, kvwire.Engine(name="decode") as c:
        asking = c.connect(p.listen(anywhere(scheme)))
        offering = p.accept(PATIENCE_S)
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
            out = e.offering.push("t", e.source.cache, EVERY)
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
    with engines() as e:
        assert e.asking.peer.name == "prefill"
        assert e.offering.peer.name == "decode"
        assert e.asking.transport == "tcp"
        assert e.asking.transport_report.taken == "tcp"
        assert "prefill" in repr(e.asking)
        assert "1 connections" in repr(e.p)
        e.asking.close()
        pulled = e.asking.pull("t", e.target.cache, EVERY)
        assert not pulled.wait().complete
        pulled.wait_drained()
        again = e.c.connect(e.p.listen("127.0.0.1:0"))
        again.abort("enough")
        assert not again.pull("t", e.target.cache, EVERY).wait().complete


def test_accepts_that_take_too_long_lose_no_connection() -> None:
    """Every connection comes out of some accept, however many of them gave up."""
    count = 30
    with ExitStack() as stack:
        p = stack.enter_context(kvwire.Engine(name="prefill"))
        c = stack.enter_context(kvwire.Engine(name="decode"))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        with pytest.raises(TimeoutError, match=r"no connection within 0\.01 s"):
            p.accept(0.01)
        address = p.listen(anywhere("inproc"))
        connecting = pool.submit(lambda: [c.connect(address) for _ in range(count)])
        accepted = 0
        while accepted < count:
            try:
                p.accept(0.0005)
            except TimeoutError:
                continue
            accepted += 1
        assert len(connecting.result(PATIENCE_S)) == count
        with pytest.raises(TimeoutError):
            p.accept(0.01)


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
        accept = pool.submit(e.c.accept)
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
            inc = c.connect(address).pull("t", Memory().cache, EVERY)
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


def test_work_on_its_loop_is_not_waited_for() -> None:
    with engines() as e:
        begun, may_end = threading.Event(), threading.Event()

        async def work(communicator: kvwire.Communicator) -> str:
            begun.set()
            await asyncio.to_thread(may_end.wait, PATIENCE_S)
            return communicator.name

        name = e.p.start(work)
        assert begun.wait(PATIENCE_S)
        assert not name.done()
        may_end.set()
        assert name.result(PATIENCE_S) == "prefill"


def test_work_that_is_no_coroutine_is_named() -> None:
    with (
        engines() as e,
        pytest.raises(kvwire.UsageError, match=r"start: pass a coroutine.*not an int"),
    ):
        e.p.start(lambda _: 5)  # type: ignore[arg-type, return-value]


def test_no_work_for_a_closed_engine() -> None:
    async def work(communicator: kvwire.Communicator) -> None:
        raise AssertionError(communicator)

    with kvwire.Engine() as engine:
        pass
    with pytest.raises(kvwire.ClosedOK):
        engine.start(work)


def test_blocks_of_a_growing_transfer_are_named_from_any_thread() -> None:
    with engines() as e:
        tokens = len(EVERY) * e.source.cache.spec.block_tokens
        out = e.p.publish("t", e.source.cache, EVERY[:1], tokens=tokens, growing=True)
        inc = e.asking.pull("t", e.target.cache, EVERY, tokens=tokens)
        out.ready(blocks=0)
        out.extend(EVERY[1:])
        out.ready(blocks=slice(1, len(EVERY)))
        out.finish()
        assert inc.wait(PATIENCE_S).complete
        assert same(e.source, EVERY, e.target, EVERY)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")
def test_its_thread_runs_on_the_cpus_it_is_given() -> None:
    async def allowed(_: kvwire.Communicator) -> set[int]:
        return os.sched_getaffinity(0)

    mine = os.sched_getaffinity(0)
    with kvwire.Engine(io_cpus=[max(mine)]) as engine:
        assert engine.start(allowed).result(PATIENCE_S) == {max(mine)}
    with kvwire.Engine() as engine:
        assert engine.start(allowed).result(PATIENCE_S) == mine
    assert os.sched_getaffinity(0) == mine


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")
def test_cpus_that_are_not_there_are_refused() -> None:
    threads = threading.active_count()
    with pytest.raises(kvwire.UsageError, match="io_cpus=1023: Invalid argument"):
        kvwire.Engine(io_cpus=[1023])
    assert threading.active_count() == threads


# --- windows --------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_of_a_window(scheme: str) -> None:
    """Offered and withdrawn from this thread; what was withdrawn is missing."""
    with engines(scheme) as e:
        window = e.p.expose("kv", e.source.cache)
        ticket = window.offer([3, 1])
        remote = e.asking.window("kv")
        outcome = remote.get(ticket, e.target.cache, [0, 1])
        assert outcome.complete
        assert same(e.source, [3, 1], e.target, [0, 1])
        window.withdraw([1])
        again = remote.get(ticket, e.target.cache, [2, 3], timeout=PATIENCE_S)
        assert sorted(again.landed) == [("kv", 2)]
        assert sorted(again.missing) == [("kv", 3)]
        remote.close()
        window.close()


def test_a_window_of_a_peer_that_is_dialled_again() -> None:
    """By its address; a get after the end of the connection opens it anew."""
    with kvwire.Engine(name="prefill") as p, kvwire.Engine(name="decode") as c:
        source = Memory()
        source.stamp(EVERY)
        target = Memory()
        window = p.expose("kv", source.cache)
        remote = c.peer(str(p.listen(anywhere("tcp")))).window("kv")
        assert remote.get(window.offer([3]), target.cache, [0]).complete
        p.accept(PATIENCE_S).abort("to see")
        outcome = remote.get(window.offer([1]), target.cache, [1])
        while "gone" in "".join(outcome.missing.reasons):  # it had not heard of it yet
            outcome = remote.get(window.offer([1]), target.cache, [1])
        assert outcome.complete
        assert same(source, [3, 1], target, [0, 1])


def test_a_window_from_many_threads() -> None:
    """Offers, withdrawals and gets at once: each get has what its ticket named."""
    with engines() as e:
        window = e.p.expose("kv", e.source.cache)
        remote = e.asking.window("kv")

        def turn(block: int) -> bool:
            for _ in range(20):
                target = Memory()
                outcome = remote.get(window.offer([block]), target.cache, [0])
                if not (outcome.complete and same(e.source, [block], target, [0])):
                    return False
                window.withdraw([block])
            return True

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(turn, range(4)))


# --- messages and memory --------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_messages_between_threads(scheme: str) -> None:
    """Of any size; a receive that gives up takes no message."""
    with engines(scheme) as e, ThreadPoolExecutor(1) as pool:
        for nbytes in (0, 5, 5_000_000):
            sent = pool.submit(e.asking.send, 7, bytes(nbytes))
            into = bytearray(nbytes)
            assert e.offering.recv(7, into, timeout=PATIENCE_S) == nbytes
            assert sent.result(PATIENCE_S) == nbytes
        with pytest.raises(kvwire.DeadlineExceeded):
            e.offering.recv(8, timeout=0.01)
        assert e.asking.send(8, b"late") == 4
        assert e.offering.recv(8, timeout=PATIENCE_S) == b"late"
        assert e.asking.send(9, b"unwanted") == 8
        e.asking.send(8, b"behind it")
        e.offering.recv(8)
        assert e.offering.unreceived == {9: 1}
        assert e.offering.discard(9) == 1
        with pytest.raises(kvwire.UsageError, match="tag"):
            e.asking.send(-1, b"")


def test_a_message_from_a_device_waits_for_the_calling_thread(
    device: SimulatedDevice,
) -> None:
    """For what its own stream has queued, and not for that of the engine's thread."""
    stream, gate = device.stream(), threading.Event()
    device.set_current(stream)
    written = np.arange(64, dtype=np.uint8)
    array = device.array(np.zeros(64, np.uint8))
    with engines() as e, ThreadPoolExecutor(1) as pool:
        stream.call(lambda: void(gate.wait()))
        stream.call(lambda: array.write(written))
        received = pool.submit(e.offering.recv, 1, timeout=PATIENCE_S)
        with pytest.raises(kvwire.DeadlineExceeded):
            e.asking.send(2, array, timeout=0.05)
        gate.set()
        assert e.asking.send(1, array, timeout=PATIENCE_S) == 64
        assert received.result(PATIENCE_S) == written.tobytes()
    stream.close()


def void(_: object) -> None:
    """For work whose result nobody wants."""


def test_memory_that_a_peer_may_reach() -> None:
    with engines() as e:
        lent = bytearray(b"computed")
        into = bytearray(8)
        with e.p.register(lent, "readwrite") as region:
            assert len(region) == 8
            assert region.access == kvwire.Access.READ | kvwire.Access.WRITE
            grant = region.grant(e.offering)
            assert e.asking.get(grant, into, timeout=PATIENCE_S) == 8
            assert into == lent
            assert e.asking.put(b"abc", grant[:3], timeout=PATIENCE_S) == 3
            assert lent == b"abcputed"
            region.revoke()
            with pytest.raises(kvwire.StaleRegion):
                e.asking.get(grant, into)
            with pytest.raises(kvwire.UsageError, match="connection of this engine"):
                region.grant(e.c)  # type: ignore[arg-type]
        with pytest.raises(kvwire.UsageError, match="closed"):
            region.grant(e.offering)


@pytest.mark.parametrize("verb", ["send", "recv", "put", "get", "read"])
def test_memory_of_an_interrupted_call_is_free(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a transport needs for it: then the interrupt arrives."""
    awaiting = kvwire.Request.__await__
    releasing = kvwire.Request.released
    free: list[bool] = []

    def awaited(self: kvwire.Request[Any]) -> Generator[Any, Any, Any]:
        interrupt()
        return (yield from awaiting(self))

    async def released(self: kvwire.Request[Any]) -> None:
        await releasing(self)
        for _ in range(1000):
            await asyncio.sleep(0)
        free.append(self.done())

    with engines() as e, e.p.register(bytearray(8), "readwrite") as region:
        grant = region.grant(e.offering)
        memory = bytearray(8)
        window = e.p.expose("kv", e.source.cache)
        ticket = window.offer([3])
        remote = e.asking.window("kv")
        calls: dict[str, Callable[[], object]] = {
            "send": lambda: e.asking.send(1, memory),
            "recv": lambda: e.asking.recv(1, memory),
            "put": lambda: e.asking.put(memory, grant),
            "get": lambda: e.asking.get(grant, memory),
            "read": lambda: remote.get(ticket, e.target.cache, [0]),
        }
        with interrupts() as interrupt, monkeypatch.context() as patch:
            patch.setattr(kvwire.Request, "__await__", awaited)
            patch.setattr(kvwire.Request, "released", released)
            with pytest.raises(KeyboardInterrupt):
                calls[verb]()
            assert free == [True]


def test_a_block_keeps_its_error_if_the_engine_is_closed() -> None:
    """And ends without one if it has none."""
    with engines() as e:
        window = e.c.expose("kv", e.target.cache)
        region = e.c.register(bytearray(8))
        remote = e.asking.window(e.p.expose("kv", e.source.cache).name)
        peer = e.c.peer("tcp://127.0.0.1:1")
        _, inc = e.begin("t")
        e.c.close()
        for one in (e.asking, peer, window, region, remote, inc):
            with pytest.raises(ZeroDivisionError), one:
                raise ZeroDivisionError
            with one:
                assert e.c.closed


def test_a_peer_is_dialled_when_it_is_used(tmp_path: Path) -> None:
    """By its address, or by what a directory knows of it."""
    where = f"file:{tmp_path}"
    with ExitStack() as stack:
        p = stack.enter_context(kvwire.Engine(name="prefill", directory=where))
        c = stack.enter_context(kvwire.Engine(name="decode", directory=where))
        p.listen(anywhere("tcp"))
        p.announce(role="prefill")
        peer = c.peer("role=prefill")
        assert peer.where == "role=prefill"
        assert "not connected" in repr(peer)
        assert peer.send(1, b"hello") == 5
        with p.accept(PATIENCE_S) as accepted:
            assert accepted.recv(1, timeout=PATIENCE_S) == b"hello"
            assert peer.connect().peer.name == "prefill"
            assert peer.connection is not None
            assert [record.name for record in c.members("role=prefill")] == ["prefill"]
        assert accepted.closed
        p.withdraw()
        peer.close()


def test_a_block_left_by_an_exception_aborts_its_connection() -> None:
    with engines() as e:
        with pytest.raises(ZeroDivisionError), e.asking:
            raise ZeroDivisionError
        assert e.asking.closed
        e.asking.wait_closed(PATIENCE_S)
        with pytest.raises(kvwire.ConnectionClosed):
            e.offering.recv(1, timeout=PATIENCE_S)


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
        assert e.p.name == e.p.config.name == "prefill"
        e.c.abort()
        with pytest.raises(kvwire.ConnectionClosed):
            e.offering.recv(1, timeout=PATIENCE_S)
        assert not e.p.closed
    assert e.p.closed
