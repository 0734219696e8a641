"""The log of blocks that a producer has marked as final, from any thread.

A mark is a range of layers times a range of block positions of one group. Marks are
checked at once, against the cache and each other, so that a mistake raises an error in
the line that makes it, instead of leaving a gap in a transfer. They are kept in order
for the life of the transfer: every consumer, and every new link after a lost one, reads
the log from its own position.
"""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from kvwire.driver.devices import Devices
from kvwire.errors import UsageError
from kvwire.kv.blocks import UNNAMED, Ids, among
from kvwire.kv.coverage import Coverage
from kvwire.kv.paged import PagedCache
from kvwire.limits import SEGMENTS_MAX
from kvwire.transfers.event_wait import EventWaiter, Failure, Wait
from kvwire.types import whole

_COMPLETE: Final = operator.attrgetter("coverage.complete")

Which = int | slice | None
Encoder: TypeAlias = "Callable[[ReadyRange, Callable[[Failure], None]], None]"
"""Begins to encode a part, and calls back once and from any thread; thread-safe."""


class ReadyRange(msgspec.Struct, frozen=True):
    """A range of layers and block positions, by their indices in one group."""

    group: str
    layers: range
    blocks: range


@dataclass(slots=True)
class _Group:
    """The blocks and layers of one group against which marks are checked.

    A growing transfer's list has room for blocks that are not named yet. Readers share
    the transfer's list, so they find later names in place.
    """

    layers: range
    ids: Ids
    coverage: Coverage
    named: int

    def check_names(self, group: str, ids: Ids) -> None:
        """Refuse block ids that exceed the list's room or are listed already."""
        if self.named + ids.size > self.ids.size:
            raise UsageError(
                f"extend: {ids.size} more blocks of group {group!r} are too many; "
                f"{self.named} of {self.ids.size} are already listed"
            )
        twice = ids[among(ids, self.ids[: self.named])]
        if twice.size:
            raise UsageError(
                f"extend: block {int(twice[0])} of group {group!r} is already listed"
            )


class ReadyLog:
    """Collects the marks of one transfer, from any thread.

    Attributes:
        log: Marks whose bytes may be sent, oldest first; grows, never shrinks.
        finished: Whether the last mark was made.
        woken: Whether ``wake`` is about to be called; it sets this to False before it
            reads the log.
        failed: Why a marked part will never be ready; "" if none has failed.
    """

    def __init__(
        self,
        cache: PagedCache,
        lists: Mapping[str, Ids],
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        devices: Devices,
        encode: Encoder | None = None,
    ) -> None:
        self.log: list[ReadyRange] = []
        self.finished: bool = False
        self.failed: str = ""
        self._loop = loop
        self._thread = threading.get_ident()
        self._wake = wake
        self._devices = devices
        # Created with the first mark that has a condition.
        self._waiter: EventWaiter | None = None
        self._encode = encode
        self.woken: bool = False
        self._lock = threading.Lock()
        self._later = 0
        self._groups = {
            name: _Group(
                group.spec.layer_indices,
                lists[name],
                Coverage(group.spec.layers, lists[name].size),
                lists[name].size - int(np.add.reduce(lists[name] == UNNAMED)),
            )
            for name, group in cache.groups.items()
        }
        self._only = next(iter(self._groups))

    def name(self, lists: Mapping[str, Ids]) -> None:
        """Add the next blocks to each group's list."""
        with self._lock:
            for name, ids in lists.items():
                self._groups[name].check_names(name, ids)
            for name, ids in lists.items():
                group = self._groups[name]
                # In this order, so that a reader finds every id that `named` counts.
                group.ids[group.named : group.named + ids.size] = ids
                group.named += ids.size

    def add(self, layers: Which, blocks: Which, group: str | None, after: Any) -> None:
        """Check a mark and append it to the log, at once or when ``after`` is done.

        Raises:
            UsageError: A layer, block or group does not exist or was marked before; the
                transfer is finished or has too many marks; or ``after`` has a type
                that cannot be waited for.
        """
        if group is None and len(self._groups) > 1:
            names = self._unnamed(layers, blocks)
            made = [self._mark(name, layers, blocks) for name in names]
        else:
            made = [self._mark(self._only if group is None else group, layers, blocks)]
        wait = None if after is None else self._prepare(after)
        at_once = wait is None and self._encode is None
        # Layer by layer, so that each is sent as soon as it is encoded.
        parts = [made] if self._encode is None else [[m] for m in _by_layer(made)]
        with self._lock:
            if self.finished or len(self.log) + self._later >= SEGMENTS_MAX:
                raise self._no_more()
            # Check all of them before adding any.
            for mark in made[1:]:
                covered = self._groups[mark.group].coverage
                if covered.overlaps(mark.layers, mark.blocks):
                    raise self._marked_before(mark)
            for mark in made:
                covered = self._groups[mark.group].coverage
                if not covered.claim(mark.layers, mark.blocks):
                    raise self._marked_before(mark)
            if at_once:
                self.log.extend(made)  # bounded: SEGMENTS_MAX
            else:
                self._later += len(parts)
        if at_once:
            self.wake()
        elif wait is None:
            self._came_true(parts, "")
        else:
            wait(lambda failure: self._came_true(parts, failure))

    def _prepare(self, after: Any) -> Wait:
        """Return a function that waits for ``after``; see EventWaiter."""
        if self._waiter is None:
            self._waiter = EventWaiter(self._devices)
        return self._waiter.prepare(after)

    def finish(self, *, partial: bool) -> None:
        """Close the log, because no more marks follow."""
        with self._lock:
            if not (partial or self.finished or self.complete):
                raise UsageError(
                    f"finish: {self._gaps()} was never marked ready; mark it, call "
                    "finish(partial=True) to send only the marked parts, or abort()"
                )
            self.finished = True
        self.wake()

    @property
    def all_in(self) -> bool:
        """Whether the log is finished, and every ``after`` is done."""
        return self.finished and not self._later and not self.failed

    @property
    def layers(self) -> tuple[int, int]:
        """Return the number of wholly marked layers, and of all layers."""
        groups = self._groups.values()
        whole = sum(group.coverage.whole_layers.bit_count() for group in groups)
        return whole, sum(len(group.layers) for group in groups)

    @property
    def complete(self) -> bool:
        """Whether everything was marked."""
        return all(map(_COMPLETE, self._groups.values()))

    def wake(self) -> None:
        """Make the loop read the log soon; one wake-up serves any number of marks."""
        if self.woken:
            return
        self.woken = True
        try:
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._wake)
            else:
                self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            # The loop is closed, so the transfer has ended. A running forward pass need
            # not notice.
            assert self._loop.is_closed()

    def close(self) -> None:
        """Stop waking the loop and encoding, because the transfer has ended."""
        self._wake = _nobody
        if self._encode is not None:
            self._encode = _nothing

    def _came_true(self, parts: list[list[ReadyRange]], failure: Failure) -> None:
        for part in parts:
            if failure or self._encode is None:
                self._arrived(part, failure)
            else:
                self._encode(part[0], partial(self._arrived, part))

    def _arrived(self, made: list[ReadyRange], failure: Failure) -> None:
        with self._lock:
            # In this order, so that the log is complete before `all_in` is true.
            if failure:
                self.failed = f"the condition of {self._named(made)} {failure}"
            else:
                self.log.extend(made)  # bounded: SEGMENTS_MAX
            self._later -= 1
        self.wake()

    def _no_more(self) -> UsageError:
        if self.finished:
            return UsageError("ready: the transfer is already finished")
        return UsageError(
            f"ready: the transfer has more than {SEGMENTS_MAX} marks; mark more "
            "layers or blocks per call"
        )

    def _marked_before(self, mark: ReadyRange) -> UsageError:
        return UsageError(
            f"ready: part of {self._named([mark])} is already marked; mark each part "
            "once, after its last write"
        )

    def _named(self, made: list[ReadyRange]) -> str:
        return ", ".join(
            f"layers {_span(self._groups[mark.group].layers, mark.layers)} x blocks "
            f"{_span(range(self._groups[mark.group].ids.size), mark.blocks)} of group "
            f"{mark.group!r}"
            for mark in made
        )

    def _mark(self, group: str, layers: Which, blocks: Which) -> ReadyRange:
        found = self._groups.get(group)
        if found is None:
            known = ", ".join(self._groups)
            raise UsageError(f"ready: unknown group {group!r}; the groups are {known}")
        first = found.layers.start
        positions = range(found.ids.size)
        mark = ReadyRange(
            group,
            (
                range(layers - first, layers - first + 1)
                if type(layers) is int and layers in found.layers
                else _range(layers, found.layers, "layers", group)
            ),
            (
                positions
                if blocks is None
                else _range(blocks, positions, "blocks", group)
            ),
        )
        if mark.blocks.stop > found.named:
            raise UsageError(
                f"ready: blocks of group {group!r} up to position "
                f"{mark.blocks.stop - 1}, but only {found.named} are listed; add more "
                "with extend()"
            )
        return mark

    def _unnamed(self, layers: Which, blocks: Which) -> list[str]:
        names = list(self._groups)
        if not (layers is None and blocks is None):
            raise UsageError(
                "ready: layers and blocks are numbered per group; pass group=, one "
                f"of {', '.join(names)}"
            )
        return names

    def _gaps(self) -> str:
        for name, group in self._groups.items():
            if not group.coverage.complete:
                layer, block = group.coverage.first_gap()
                return (
                    f"layer {group.layers[layer]} of block position {block} of group "
                    f"{name!r} ({group.coverage.untouched} layers are wholly missing)"
                )
        return ""


def _by_layer(made: list[ReadyRange]) -> Iterator[ReadyRange]:
    for mark in made:
        for layer in mark.layers:
            yield ReadyRange(mark.group, range(layer, layer + 1), mark.blocks)


def _nobody() -> None:
    """Do nothing: the wake-up of a closed log."""


def _nothing(mark: ReadyRange, then: Callable[[Failure], None]) -> None:
    """Do nothing: the encoder of a closed log."""


def _range(which: Which, held: range, what: str, group: str) -> range:
    """Return a caller's range, relative to the first index held."""
    if which is None:
        return held if not held.start else range(len(held))
    where = f"ready: {what} of group {group!r}"
    if isinstance(which, slice):
        start = which.start
        stop = which.stop
        if type(start) is not int:
            start = held.start if start is None else _index(start, where)
        if type(stop) is not int:
            stop = held.stop if stop is None else _index(stop, where)
        inside = held.start <= start <= stop <= held.stop
        if which.step not in (None, 1) or not inside:
            raise UsageError(
                f"{where}: {start} to {stop} (step {which.step or 1}) is outside "
                f"{held.start} to {held.stop}"
            )
        return range(start - held.start, stop - held.start)
    index = which if type(which) is int else _index(which, where)
    if index not in held:
        raise UsageError(f"{where}: {index} is outside {held.start} to {held.stop - 1}")
    return range(index - held.start, index - held.start + 1)


def _index(which: object, where: str) -> int:
    number = whole(which)
    if number is None:
        raise UsageError(f"{where}: {which!r} must be a number or a slice of numbers")
    return number


def _span(held: range, indices: range) -> str:
    return f"{held.start + indices.start} to {held.start + indices.stop - 1}"
