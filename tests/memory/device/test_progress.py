"""What a graph writes is read as what it means, for this pass and no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import RequestCancelled, UsageError
from kvwire.memory.device.progress import GraphReplay, LayerCounter
from tests.support.simulated_device import SimulatedDevice, SimulatedStream

LAYERS = 5


def pinned_word() -> memoryview:
    return np.zeros(1, np.uint64).view(np.uint8).data


class Graph:
    """What was captured: after each layer, one write of the word."""

    def __init__(self, stream: SimulatedStream, counter: LayerCounter) -> None:
        self._stream = stream
        self._word = np.frombuffer(counter.word, np.uint64)

    def replay(self, run: GraphReplay, layers: int = LAYERS) -> None:
        for layer in range(layers):
            self._stream.call(lambda n=layer: self._write(run.base + n + 1))  # type: ignore[misc]

    def _write(self, value: int) -> None:
        self._word[0] = value


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice()
    yield made
    made.close()


@pytest.fixture
def stream(device: SimulatedDevice) -> Iterator[SimulatedStream]:
    made = device.stream()
    yield made
    made.close()


@given(
    generation=st.integers(1, 2**40),
    layers=st.integers(0, LAYERS),
    other=st.integers(1, 2**40),
    layer=st.integers(0, LAYERS - 1),
)
def test_a_word_says_which_layers_of_which_pass_are_done(
    generation: int, layers: int, other: int, layer: int
) -> None:
    counter = LayerCounter(LAYERS, pinned_word())
    word = GraphReplay(counter, generation).base + layers
    np.frombuffer(counter.word, np.uint64)[0] = word
    done = GraphReplay(counter, other).layer(layer).done()
    counter.close()
    assert done == ((generation, layers) > (other, layer))


def test_layers_are_told_as_they_are_done(
    device: SimulatedDevice, stream: SimulatedStream
) -> None:
    counter = LayerCounter(LAYERS, pinned_word())
    graph, told = Graph(stream, counter), list[int]()
    run, all_told = counter.begin(), threading.Event()

    def note(layer: int, _: object) -> None:
        told.append(layer)
        if len(told) == LAYERS:
            all_told.set()

    for layer in range(LAYERS):
        run.layer(layer).add_done_callback(partial(note, layer))
    device.hold()
    graph.replay(run)
    assert not run.layer(0).done()
    device.release()
    all_told.wait()
    assert told == list(range(LAYERS))
    run.layer(LAYERS - 1).result()


def test_a_word_of_the_pass_before_says_nothing_of_this_one(
    stream: SimulatedStream,
) -> None:
    counter = LayerCounter(LAYERS, pinned_word())
    graph = Graph(stream, counter)
    first, second = counter.begin(), counter.begin()
    graph.replay(first)
    stream.record().synchronize()
    assert first.layer(LAYERS - 1).done()
    assert not second.layer(0).done()
    graph.replay(second, layers=2)
    stream.record().synchronize()
    assert [second.layer(n).done() for n in range(3)] == [True, True, False]
    assert first.layer(0).done()
    counter.close()


def test_what_is_done_is_told_at_once(stream: SimulatedStream) -> None:
    counter = LayerCounter(LAYERS, pinned_word())
    run, told = counter.begin(), list[Any]()
    Graph(stream, counter).replay(run)
    stream.record().synchronize()
    tick, before = run.layer(3), threading.active_count()
    tick.add_done_callback(told.append)
    assert told == [tick]
    assert threading.active_count() == before, "nobody had to look"


def test_who_raises_takes_nothing_from_the_others(
    stream: SimulatedStream, caplog: pytest.LogCaptureFixture
) -> None:
    """One counter is for all transfers of a pass, and of the passes behind it."""
    counter, told = LayerCounter(LAYERS, pinned_word()), threading.Semaphore(0)
    graph = Graph(stream, counter)

    def bug(_: object) -> None:
        raise ZeroDivisionError("planted")

    first, second = counter.begin(), counter.begin()
    tick = first.layer(0)
    for call in (bug, lambda _: told.release()):
        tick.add_done_callback(call)
    first.layer(1).add_done_callback(lambda _: told.release())
    graph.replay(first)
    for _ in range(2):
        assert told.acquire(timeout=10)
    second.layer(0).add_done_callback(lambda _: told.release())
    graph.replay(second)
    assert told.acquire(timeout=10)
    assert "planted" in caplog.text


def test_a_closed_counter_tells_those_who_wait() -> None:
    counter = LayerCounter(LAYERS, pinned_word())
    told: list[Any] = []
    tick = counter.begin().layer(0)
    tick.add_done_callback(told.append)
    counter.close()
    assert told == [tick]
    with pytest.raises(RequestCancelled, match="was closed"):
        tick.result()


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="layers=0"):
        LayerCounter(0, pinned_word())
    with pytest.raises(UsageError, match="word: 4 bytes"):
        LayerCounter(LAYERS, pinned_word()[:4])
    with pytest.raises(UsageError, match="writable bytes"):
        LayerCounter(LAYERS, pinned_word().toreadonly())
    with pytest.raises(UsageError, match="layer 5: the counter has 5"):
        LayerCounter(LAYERS, pinned_word()).begin().layer(LAYERS)
