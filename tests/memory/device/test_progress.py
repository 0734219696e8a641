"""What a graph writes is read as what it means, for this pass and no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import BackendUnavailable, RequestCancelled, UsageError
from kvwire.memory.device.progress import GraphReplay, LayerCounter
from tests.support.waiting import PATIENCE_S
from tests.test_aio import no_more_threads

LAYERS = 5


def pinned_word() -> memoryview:
    return np.zeros(1, np.uint64).view(np.uint8).data


@pytest.fixture
def counter() -> Iterator[LayerCounter]:
    made = LayerCounter(LAYERS, pinned_word())
    yield made
    made.close()


def write(counter: LayerCounter, value: int) -> None:
    """Write the word, as a captured graph does after each layer."""
    np.frombuffer(counter.word, np.uint64)[0] = value


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
    write(counter, GraphReplay(counter, generation).base + layers)
    done = GraphReplay(counter, other).layer(layer).done()
    counter.close()
    assert done == ((generation, layers) > (other, layer))


def test_layers_are_told_as_they_are_done(counter: LayerCounter) -> None:
    told, run = list[int](), counter.begin()
    each = [threading.Event() for _ in range(LAYERS)]

    def note(layer: int, _: object) -> None:
        told.append(layer)
        each[layer].set()

    for layer in range(LAYERS):
        run.layer(layer).add_done_callback(partial(note, layer))
    write(counter, run.base + 1)
    assert each[0].wait(timeout=10)
    write(counter, run.base + LAYERS)
    assert each[-1].wait(timeout=10)
    assert told == list(range(LAYERS))
    for thread in threading.enumerate():
        if thread.name == "kvwire counter":
            thread.join(timeout=10)  # nobody waits any more
    again = counter.begin()
    done = again.layer(0)
    write(counter, again.base + 1)
    done.result(timeout=10)


def test_a_word_of_the_pass_before_says_nothing_of_this_one(
    counter: LayerCounter,
) -> None:
    first, second = counter.begin(), counter.begin()
    write(counter, first.base + LAYERS)
    assert first.layer(LAYERS - 1).done()
    assert not second.layer(0).done()
    write(counter, second.base + 2)
    assert [second.layer(n).done() for n in range(3)] == [True, True, False]
    assert first.layer(0).done()


def test_for_what_is_done_nobody_has_to_look(counter: LayerCounter) -> None:
    run, before = counter.begin(), threading.active_count()
    write(counter, run.base + LAYERS)
    run.layer(3).result(timeout=0)
    assert threading.active_count() == before


def test_who_raises_takes_nothing_from_the_others(
    counter: LayerCounter, caplog: pytest.LogCaptureFixture
) -> None:
    """One counter is for all transfers of a pass, and of the passes behind it."""

    def bug(_: object) -> None:
        raise ZeroDivisionError("planted")

    first, second = counter.begin(), counter.begin()
    first.layer(0).add_done_callback(bug)
    others = [first.layer(0), first.layer(1), second.layer(0)]
    write(counter, first.base + LAYERS)
    for done in others[:2]:
        done.result(timeout=10)
    write(counter, second.base + LAYERS)
    others[2].result(timeout=10)
    assert "planted" in caplog.text


def test_a_closed_counter_tells_those_who_wait(counter: LayerCounter) -> None:
    done = counter.begin().layer(0)
    assert not done.cancel(), "a device cannot be told to stop"
    counter.close()
    with pytest.raises(RequestCancelled, match="was closed"):
        done.result(timeout=0)


def test_what_cannot_be(counter: LayerCounter) -> None:
    with pytest.raises(UsageError, match="layers=0"):
        LayerCounter(0, pinned_word())
    with pytest.raises(UsageError, match="word: got 4 bytes"):
        LayerCounter(LAYERS, pinned_word()[:4])
    with pytest.raises(UsageError, match="writable bytes"):
        LayerCounter(LAYERS, pinned_word().toreadonly())
    with pytest.raises(UsageError, match="layer 5 does not exist; the counter has 5"):
        counter.begin().layer(LAYERS)


def test_a_wait_that_no_thread_can_watch_is_refused_alone(
    counter: LayerCounter,
) -> None:
    run = counter.begin()
    with no_more_threads(), pytest.raises(BackendUnavailable, match="ulimit -u"):
        run.layer(0)
    done = run.layer(1)
    write(counter, run.base + 2)
    assert done.result(PATIENCE_S) is None
