"""Caches in device memory, over transports that know host memory only.

A simulated device plays the GPU: host code that touched its memory would end the
process, and its streams run beside everything else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvwire import (
    BackendUnavailable,
    Incoming,
    Outgoing,
    UsageError,
)
from kvwire.limits import KIB
from kvwire.memory import LayerCounter
from kvwire.memory.device.copy_engine import WatchedStream
from tests.support import inside
from tests.support.device_caches import BLOCKS, LAYERS, LAYOUTS
from tests.support.device_caches import DeviceCache as Cache
from tests.support.pairs import Pair, connected, turns, until
from tests.support.simulated_device import (
    SimulatedArray,
    SimulatedDevice,
)
from tests.test_aio import no_more_threads

SOURCE = [7, 3, 39, 20, 21, 22, 0, 11, 30, 31, 5, 1]
TARGET = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24]


def begin(pair: Pair, source: Cache, target: Cache) -> tuple[Outgoing, Incoming]:
    """A whole cache on its way to the near side's peer: all of it is marked."""
    inc = pair.right.pull("t", target.paged, TARGET)
    out = pair.near.publish("t", source.paged, SOURCE)
    out.ready()
    out.finish()
    return out, inc


async def drained(*ends: Outgoing | Incoming) -> None:
    """Wait until none of them touches memory any more."""
    for end in ends:
        await end.drained()


@pytest.fixture(params=["tcp", "inproc"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with connected(request.param, chunk_bytes=64 * KIB) as made:
        yield made


async def test_a_lack_of_threads_is_no_failure_of_the_device(
    pair: Pair, near: SimulatedDevice, far: SimulatedDevice
) -> None:
    """It passes: the next transfer works."""
    source, target = Cache(near), Cache(far, seed=None)
    with no_more_threads(), pytest.raises(BackendUnavailable, match="ulimit -u"):
        await pair.right.pull("t", target.paged, TARGET)
    out, inc = begin(pair, source, target)
    assert (await inc).complete
    await drained(out, inc)


@pytest.mark.parametrize("target_layout", list(LAYOUTS))
@pytest.mark.parametrize("source_layout", list(LAYOUTS))
async def test_from_device_to_device(
    source_layout: str, target_layout: str, near: SimulatedDevice, far: SimulatedDevice
) -> None:
    source, target = Cache(near, source_layout), Cache(far, target_layout, None)
    async with connected("tcp", chunk_bytes=64 * KIB) as pair:
        inc = pair.left.pull("t", target.paged, TARGET)
        async with pair.far.publish("t", source.paged, SOURCE) as out:
            for layer in range(LAYERS):
                out.ready(layers=layer)
        assert (await inc).complete
        assert (await out).complete
        await inc.drained()
        await out.drained()
    assert np.array_equal(target.blocks(TARGET), source.blocks(SOURCE))
    untouched = [b for b in range(BLOCKS) if b not in TARGET]
    assert not target.blocks(untouched).any()


async def test_a_mark_waits_for_the_event_of_a_kernel(
    pair: Pair, near: SimulatedDevice
) -> None:
    """The producer's own stream writes the cache; nobody waits for it but us."""
    source, target = Cache(near, seed=None), Cache(None, seed=None)
    written = Cache(None, seed=5)
    assert source.arrays is not None
    compute = near.stream()
    inc = pair.right.pull("t", target.paged, TARGET)
    near.hold()
    async with pair.near.publish("t", source.paged, SOURCE) as out:
        for layer, array in enumerate(source.arrays):
            compute.call(kernel(array, written, layer))
            out.ready(layers=layer, after=compute.record())
    assert not out.done()
    assert not inc.layer_landed(0)
    near.release()
    assert (await inc).complete
    await drained(out, inc)
    assert np.array_equal(target.blocks(TARGET), written.blocks(SOURCE))
    compute.close()


def kernel(array: SimulatedArray, values: Cache, layer: int) -> Callable[[], None]:
    """What a model's layer does to the cache."""
    return lambda: array.write(values.values[layer])


async def test_an_event_that_fails_ends_the_transfer(
    pair: Pair, near: SimulatedDevice
) -> None:
    compute = near.stream()
    source, target = Cache(near), Cache(None, seed=None)
    inc = pair.right.pull("t", target.paged, TARGET)
    out = pair.near.publish("t", source.paged, SOURCE)
    near.hold()
    compute.call(lambda: None)
    out.ready(after=compute.record())
    out.finish()
    near.fail("an illegal memory access")
    near.release()
    outcome = await inc
    assert not outcome.complete
    assert "an illegal memory access" in str(outcome.missing)
    await drained(out, inc)
    compute.close()


async def test_slots_are_all_that_waits_for_a_slow_device(
    pair: Pair, near: SimulatedDevice
) -> None:
    """The device takes nothing: the link is paused, and the wire fills up behind it."""
    source, target = Cache(None), Cache(near, seed=None)
    near.hold()
    out, inc = begin(pair, source, target)
    staged = inside.staging(pair.right)
    await until(lambda: staged.paused)
    # Whatever else comes waits in the wire: a message behind it as well.
    sent = pair.left.send(7, b"behind")
    received = pair.right.recv(7)
    await turns(50)
    assert staged.paused
    assert not received.done()
    assert not inc.layer_landed(0)
    near.release()
    assert bytes(await received) == b"behind"
    await sent
    assert (await inc).complete
    await until(lambda: not staged.paused)
    await drained(out, inc)
    assert np.array_equal(target.blocks(TARGET), source.blocks(SOURCE))


async def test_a_slow_device_is_given_no_more_than_its_slots(
    pair: Pair, near: SimulatedDevice
) -> None:
    """On the way out: the core keeps the rest, for whatever is more urgent."""
    source, target = Cache(near), Cache(None, seed=None)
    near.hold()
    out, inc = begin(pair, source, target)
    staged = inside.staging(pair.left)
    await until(lambda: staged.waiting is not None)
    assert not staged.quiet
    # Host memory is not held up by that: a message overtakes all of it.
    received = pair.right.recv(7)
    await pair.left.send(7, b"urgent")
    assert bytes(await received) == b"urgent"
    near.release()
    assert (await inc).complete
    await drained(out, inc)
    assert np.array_equal(target.blocks(TARGET), source.blocks(SOURCE))


@pytest.mark.parametrize("device_side", ["producer", "consumer"])
@pytest.mark.parametrize("how", ["abort", "connection"])
async def test_memory_has_not_drained_while_a_device_copies(
    pair: Pair, near: SimulatedDevice, device_side: str, how: str
) -> None:
    source = Cache(near if device_side == "producer" else None)
    target = Cache(near if device_side == "consumer" else None, seed=None)
    near.hold()
    out, inc = begin(pair, source, target)
    end = out if device_side == "producer" else inc
    mine, owner = pair.left, pair.near
    if device_side == "consumer":
        mine, owner = pair.right, pair.far
    await until(lambda: not inside.staging(mine).quiet)
    if how == "abort":
        end.abort("enough")
    else:
        mine.abort("enough")
        end.abort("enough")
    assert not (await end).complete
    await turns(50)
    assert not end.is_drained
    assert owner.quarantined_bytes > 0
    near.release()
    await end.drained()
    assert owner.quarantined_bytes == 0
    other = inc if device_side == "producer" else out
    other.abort()
    await other.drained()


async def test_a_failed_device_keeps_its_memory(
    pair: Pair, near: SimulatedDevice
) -> None:
    """It proves nothing any more, so what it was copying is never said to be free."""
    source, target = Cache(near), Cache(None, seed=None)
    near.hold()
    out, inc = begin(pair, source, target)
    await until(lambda: not inside.staging(pair.left).quiet)
    near.fail("it fell off the bus")
    near.release()
    # No other link would help, so the lease is not waited for.
    outcome = await inc
    assert "it fell off the bus" in str(outcome.missing)
    assert not (await out).complete
    await inc.drained()
    assert not out.is_drained
    assert pair.near.quarantined_bytes > 0
    engine = inside.services(pair.near).devices.copy_engine(near.device)
    assert engine.kept  # its slot as well


async def test_a_copy_that_is_queued_and_cannot_be_watched_keeps_its_memory(
    pair: Pair, near: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device works, and goes on to read and write what the copy was given."""
    source, target = Cache(near), Cache(None, seed=None)
    near.hold()
    monkeypatch.setattr(WatchedStream, "watch", _bug)
    out, inc = begin(pair, source, target)
    assert "planted" in str((await inc).missing)
    await inc.drained()
    assert not out.is_drained
    assert inside.services(pair.near).devices.copy_engine(near.device).kept


async def test_a_bug_behind_a_copy_ends_its_own_connection_only(
    pair: Pair,
    near: SimulatedDevice,
    far: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All connections of a communicator share the streams of a device."""
    other = await pair.near.connect(pair.address)
    there = await pair.far.accept()
    out, inc = begin(pair, Cache(near), Cache(far, seed=None))
    monkeypatch.setattr(inside.driver(pair.right), "_in_place", _bug)
    await pair.right.wait_closed()
    for end in (out, inc):
        end.abort()
    await drained(out, inc)
    assert not there.closed
    source, target = Cache(near, seed=5), Cache(far, seed=None)
    again = there.pull("u", target.paged, TARGET)
    async with pair.near.publish("u", source.paged, SOURCE) as more:
        more.ready()
    assert (await again).complete
    await drained(again)
    np.testing.assert_array_equal(source.blocks(SOURCE), target.blocks(TARGET))
    await other.close()


def _bug(*_: Any) -> None:
    raise ZeroDivisionError("planted")


async def test_a_lane_that_breaks_gives_its_slots_back(near: SimulatedDevice) -> None:
    source, target = Cache(near), Cache(None, seed=None)
    async with connected("tcp", chunk_bytes=64 * KIB, lanes=3) as pair:
        inc = pair.far.expect("t", target.paged, TARGET)
        out = pair.left.push("t", source.paged, SOURCE)
        out.ready(layers=0)
        await inc.layer(0)
        for endpoint in list(inside.lanes(pair.left).open):
            endpoint.lane.abort()
        out.ready(layers=slice(1, None))
        out.finish()
        assert (await inc).complete
        await inc.drained()
        await out.drained()
    assert np.array_equal(target.blocks(TARGET), source.blocks(SOURCE))


async def test_the_event_of_a_layer(pair: Pair, near: SimulatedDevice) -> None:
    source, target = Cache(None), Cache(near, seed=None)
    inc = pair.right.pull("t", target.paged, TARGET)
    host = pair.right.pull("u", Cache(None, seed=None).paged, TARGET)
    with pytest.raises(UsageError, match="layer 0 has not landed yet"):
        inc.layer_event(0)
    with pytest.raises(UsageError, match="is in host memory; use `await layer"):
        host.layer_event(0)
    async with pair.near.publish("t", source.paged, SOURCE) as out:
        out.ready()
    await inc.layer(0)
    compute, seen = near.stream(), list[npt.NDArray[Any]]()
    compute.wait(inc.layer_event(0))
    compute.call(lambda: seen.append(target.blocks(TARGET)[0]))
    compute.record().synchronize()
    assert np.array_equal(seen[0], source.blocks(SOURCE)[0])
    assert (await inc).complete
    host.abort()
    await drained(inc, out, host)
    compute.close()


async def test_marks_of_a_captured_graph(pair: Pair, near: SimulatedDevice) -> None:
    """No Python runs between layers: the device writes a word, and layers flow."""
    source, target = Cache(near, seed=None), Cache(None, seed=None)
    written = Cache(None, seed=9)
    assert source.arrays is not None
    word = near.pinned(8)
    counter = LayerCounter(LAYERS, word)
    graph, values = near.stream(), np.frombuffer(word, np.uint64)
    inc = pair.right.pull("t", target.paged, TARGET)
    run = counter.begin()
    near.hold()
    async with pair.near.publish("t", source.paged, SOURCE) as out:
        for layer, array in enumerate(source.arrays):
            out.ready(layers=layer, after=run.layer(layer))
            graph.call(kernel(array, written, layer))
            graph.call(partial(values.__setitem__, 0, run.base + layer + 1))
    assert not out.done()
    near.release()
    assert (await inc).complete
    await drained(out, inc)
    assert np.array_equal(target.blocks(TARGET), written.blocks(SOURCE))
    graph.close()
