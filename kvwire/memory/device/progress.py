"""How far a captured CUDA graph has come: a word of host memory that the graph writes.

Python hooks do not run while a graph is replayed, so nobody could call ``ready`` for a
layer. Instead the graph itself writes one word of pinned memory after each layer. The
word is coded by generation, since the same graph is replayed for every pass::

    word = generation * 2**16 + layers that are done

The generation comes from device memory that the host sets before each replay, so a word
left over from another pass is never taken for this one. With torch, captured once::

    base = torch.zeros(1, dtype=torch.int64, device="cuda")
    host = torch.frombuffer(counter.word, dtype=torch.int64)
    for n, layer in enumerate(model.layers):
        ...
        host.copy_(base + (n + 1), non_blocking=True)

and for each pass::

    run = counter.begin()
    for n in range(layers):
        out.ready(layers=n, after=run.layer(n))
    base.fill_(run.base)
    graph.replay()

A write by the device wakes nobody. While something waits for a pass, and only then, a
thread looks at the word at a bounded rate. Passes are replayed in the order of their
``begin``, each once: a later generation says that the earlier ones are done.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from kvwire.errors import RequestCancelled, UsageError
from kvwire.limits import KV_LAYERS_MAX

logger: logging.Logger = logging.getLogger("kvwire.devices")

WORD_BYTES: Final = 8
_LAYER_BITS: Final = 16
# Between two looks. A layer of a large model takes about as long, so one look finds one
# layer; each costs a microsecond.
LOOK_S: Final = 0.0005

assert KV_LAYERS_MAX < 1 << _LAYER_BITS


class Position(NamedTuple):
    """Says how far the device has come."""

    generation: int
    layers: int

    @classmethod
    def decode(cls, word: int) -> Position:
        """Read a word."""
        return cls(word >> _LAYER_BITS, word & ((1 << _LAYER_BITS) - 1))

    def has_done(self, generation: int, layer: int) -> bool:
        """Tell whether a layer of a pass is done."""
        return (self.generation, self.layers) > (generation, layer)


class LayerCounter:
    """Owns a word that a graph writes, and wakes those who wait for its value.

    Args:
        layers: Of the model.
        word: 8 bytes that the device can write to, such as pinned memory.

    Attributes:
        word: Those bytes.

    Raises:
        UsageError: Too many layers, or memory that is no such word.
    """

    def __init__(self, layers: int, word: memoryview) -> None:
        if not 1 <= layers <= KV_LAYERS_MAX:
            raise UsageError(f"layers={layers}: 1 to {KV_LAYERS_MAX}")
        array = np.frombuffer(word, np.uint8)
        if array.size != WORD_BYTES or array.ctypes.data % WORD_BYTES or word.readonly:
            raise UsageError(
                f"word: {array.size} bytes at {array.ctypes.data:#x}; pass "
                f"{WORD_BYTES} writable bytes at a multiple of {WORD_BYTES}"
            )
        self.word = word
        self.layers = layers
        # Read as one load: the device writes all of it at once.
        self._value = array.view(np.uint64)
        self._value[0] = 0
        self._generations = itertools.count(1)
        self._lock = threading.Condition()
        self._waiting: list[LayerDone] = []
        self._looking = False

    def begin(self) -> GraphReplay:
        """Begin a pass, to be replayed once and behind those before."""
        return GraphReplay(self, next(self._generations))

    @property
    def position(self) -> Position:
        """Return how far the device has come."""
        return Position.decode(int(self._value[0]))

    def close(self) -> None:
        """Give up: what has not been done by now counts as failed."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._lock.notify()
        for tick in waiting:
            tick.settle(RequestCancelled("the layer counter was closed"))

    def watch(self, tick: LayerDone) -> None:
        """Look for this one as well, until it is done."""
        with self._lock:
            # As many as there are layers in the passes under way.
            self._waiting.append(tick)  # bounded: SEGMENTS_MAX
            if self._looking:
                return
            self._looking = True
        threading.Thread(target=self._look, name="kvwire counter", daemon=True).start()

    def _look(self) -> None:
        while True:
            position = self.position
            with self._lock:
                done = [t for t in self._waiting if t.is_before(position)]
                self._waiting = [t for t in self._waiting if not t.is_before(position)]
            for tick in done:
                tick.settle(None)
            with self._lock:
                if not self._waiting:
                    self._looking = False
                    return
                self._lock.wait(LOOK_S)


class GraphReplay(NamedTuple):
    """Counts one replay of the graph.

    Attributes:
        counter: Whose it is.
        generation: 1 for the first.
    """

    counter: LayerCounter
    generation: int

    @property
    def base(self) -> int:
        """Return what the graph adds the number of its layers to."""
        return self.generation << _LAYER_BITS

    def layer(self, layer: int) -> LayerDone:
        """Return what is done when a layer of this pass is, for ``after=``.

        Raises:
            UsageError: The model has no such layer.
        """
        if not 0 <= layer < self.counter.layers:
            raise UsageError(f"layer {layer}: the counter has {self.counter.layers}")
        return LayerDone(self.counter, self.generation, layer)


class LayerDone:
    """Says that one layer of one pass is done; waited for as a future is."""

    def __init__(self, counter: LayerCounter, generation: int, layer: int) -> None:
        self._counter = counter
        self._generation = generation
        self._layer = layer
        self._lock = threading.Lock()
        self._settled = False
        self._error: Exception | None = None
        self._calls: list[Callable[[Any], object]] = []

    def is_before(self, position: Position) -> bool:
        """Tell whether the device has come so far."""
        return position.has_done(self._generation, self._layer)

    def done(self) -> bool:
        """Tell whether its outcome is known."""
        return self._settled or self.is_before(self._counter.position)

    def result(self) -> None:
        """Return nothing, once it is done.

        Raises:
            RequestCancelled: The counter was closed before.
        """
        if self._error is not None:
            raise self._error

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """Call with this object when it is done, from any thread; at once if it is."""
        if not self.done():
            with self._lock:
                if not self._settled:
                    first = not self._calls
                    self._calls.append(call)  # bounded: SEGMENTS_MAX
                    if first:
                        self._counter.watch(self)
                    return
        call(self)

    def settle(self, error: Exception | None) -> None:
        """End it: it is done, or never will be."""
        with self._lock:
            self._settled, self._error = True, error
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call(self)
            except Exception:
                # As futures do: the thread that looks has others to tell.
                logger.exception("a callback of a layer counter")
