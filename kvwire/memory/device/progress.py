"""The progress of a captured CUDA graph: a word of host memory that the graph writes.

Python hooks do not run while a graph is replayed, so nothing could call ``ready`` for a
layer. Instead, the graph itself writes one word of pinned memory after each layer. The
word contains a generation, because the same graph is replayed for every pass::

    word = generation * 2**16 + layers that are done

The generation comes from device memory that the host sets before each replay, so a
value left over from another pass is never mistaken for one of this pass. With torch,
captured once::

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

A write by the device does not wake any thread. So a thread polls the word at a bounded
rate, but only while a future waits for a pass. Replay the passes in the order in which
they were begun, each one once: a later generation means that all earlier passes are
done.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import Final, NamedTuple

import numpy as np

from kvwire.errors import RequestCancelled, UsageError, begin_thread
from kvwire.limits import KV_LAYERS_MAX

WORD_BYTES: Final = 8
_LAYER_BITS: Final = 16
# Time between two polls. A layer of a large model takes about this long, so each poll
# finds about one layer; a poll takes a microsecond.
LOOK_S: Final = 0.0005

assert KV_LAYERS_MAX < 1 << _LAYER_BITS


class LayerCounter:
    """A word that a graph writes, and the futures that wait for its value.

    Args:
        layers: The number of the model's layers.
        word: 8 bytes that the device can write to, such as pinned memory.

    Attributes:
        word: Those bytes.

    Raises:
        UsageError: There are too many layers, or the memory is not such a word.
    """

    def __init__(self, layers: int, word: memoryview) -> None:
        if not 1 <= layers <= KV_LAYERS_MAX:
            raise UsageError(f"layers={layers}: pass 1 to {KV_LAYERS_MAX}")
        array = np.frombuffer(word, np.uint8)
        if array.size != WORD_BYTES or array.ctypes.data % WORD_BYTES or word.readonly:
            raise UsageError(
                f"word: got {array.size} bytes at {array.ctypes.data:#x}; pass "
                f"{WORD_BYTES} writable bytes, aligned to {WORD_BYTES}"
            )
        self.word = word
        self.layers = layers
        # Read as one load: the device writes all of it at once.
        self._value = array.view(np.uint64)
        self._value[0] = 0
        self._generations = itertools.count(1)
        self._lock = threading.Condition()
        # Futures, each with the largest value of the word at which it is still pending.
        self._waiting: list[tuple[int, Future[None]]] = []
        self._looking = False

    def begin(self) -> GraphReplay:
        """Begin a pass, to be replayed once, after all earlier passes."""
        return GraphReplay(self, next(self._generations))

    def close(self) -> None:
        """Fail every pending future."""
        with self._lock:
            waiting = self._waiting
            self._waiting = []
            self._lock.notify()
        for _, done in waiting:
            done.set_exception(RequestCancelled("the layer counter was closed"))

    def behind(self, value: int) -> Future[None]:
        """Return a future that is done once the word is larger than ``value``."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # nobody can cancel a device's work
        if int(self._value[0]) > value:
            done.set_result(None)
            return done
        with self._lock:
            if not self._looking:
                begin_thread(
                    threading.Thread(
                        target=self._look, name="kvwire counter", daemon=True
                    )
                )
                self._looking = True
            # At most the number of layers of all passes in progress.
            self._waiting.append((value, done))  # bounded: SEGMENTS_MAX
        return done

    def _look(self) -> None:
        while True:
            word = int(self._value[0])
            with self._lock:
                over = [done for value, done in self._waiting if word > value]
                self._waiting = [one for one in self._waiting if word <= one[0]]
            for done in over:
                done.set_result(None)
            with self._lock:
                if not self._waiting:
                    self._looking = False
                    return
                self._lock.wait(LOOK_S)


class GraphReplay(NamedTuple):
    """One replay of the graph.

    Attributes:
        counter: The counter that began it.
        generation: Its number, from 1.
    """

    counter: LayerCounter
    generation: int

    @property
    def base(self) -> int:
        """Return the counter's value at the start; the graph adds one per layer."""
        return self.generation << _LAYER_BITS

    def layer(self, layer: int) -> Future[None]:
        """Return a future for ``after=``: done when this pass has done a layer.

        It fails with :exc:`RequestCancelled` if the counter is closed before.

        Raises:
            UsageError: The model has no such layer.
            BackendUnavailable: The thread that watches it cannot be started.
        """
        if not 0 <= layer < self.counter.layers:
            raise UsageError(
                f"layer {layer} does not exist; the counter has {self.counter.layers} "
                "layers"
            )
        return self.counter.behind(self.base + layer)
