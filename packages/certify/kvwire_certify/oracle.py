"""The oracle: every word of memory identifies its writer, life and place.

A *life* is the time between two writes to one piece of memory. A 64-bit word contains
the number of the process that wrote it, the number of the life, and the word's place in
that process's memory. So every word, wherever it is found, shows where it came from. A
hole, a torn block, another request's bytes and a late write are always different words,
and never equal the right ones by luck.

:class:`WatchedMemory` is the memory of one process. It knows the allowed content of
each slot, and :meth:`WatchedMemory.watch` checks all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

WORD_BYTES: Final = 8
_LIFE_BITS: Final = 28
_PLACE_BITS: Final = 32
_HALF: Final = np.uint64(_PLACE_BITS)
_PLACES: Final = np.uint64((1 << _PLACE_BITS) - 1)
_LIVES: Final = np.uint64((1 << _LIFE_BITS) - 1)
# An odd number has an inverse modulo 2**64, so a word can be decoded.
_MIX: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_UNMIX: Final = np.uint64(pow(0x9E37_79B9_7F4A_7C15, -1, 1 << 64))


class Origin(NamedTuple):
    """The origin of a word: its writer, life and place."""

    writer: int
    life: int
    place: int


def stamp(writer: int, life: int | Words, places: npt.NDArray[np.integer]) -> Words:
    """Return the words that a writer writes to some places, in one life or several.

    Each byte of a word depends on all three.
    """
    lives = np.uint64(writer << _LIFE_BITS) | np.asarray(life, np.uint64) & _LIVES
    return _mixed(lives << _HALF | places.astype(np.uint64), _MIX)


def content(nbytes: int, life: int = 1, writer: int = 1) -> bytes:
    """Return the first bytes that a writer writes in one life, from place 0 on."""
    words = stamp(writer, life, np.arange(-(-nbytes // WORD_BYTES)))
    return words.tobytes()[:nbytes]


def origin(word: int) -> Origin:
    """Return a word's origin; meaningless unless :func:`stamp` made the word."""
    (name,) = _mixed(np.array([word], np.uint64), _UNMIX).tolist()
    writer_and_life, place = divmod(name, 1 << _PLACE_BITS)
    writer, life = divmod(writer_and_life, 1 << _LIFE_BITS)
    return Origin(writer, life, place)


def _mixed(words: Words, factor: np.uint64) -> Words:
    words = (words ^ words >> _HALF) * factor
    return words ^ words >> _HALF


class Wrong(AssertionError):
    """A broken promise: unexpected words, or another failure.

    Attributes:
        rule: The broken promise; a transport's is a key of :data:`RULES`.
        text: A description: where, how much, and whose bytes are there.
    """

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{text} [{rule}]")
        self.rule = rule
        self.text = text


RULES: Final = {
    "late-write": "Memory is not written after the operation on it has ended.",
    "late-read": "A failed put never sends bytes written to its source afterwards.",
    "stale": "A get returns the content that its reference is for, not newer or older.",
    "torn": "Landed bytes all come from the same life of the memory.",
    "hole": "Landed memory has no gaps that were never written.",
    "misplaced": "Every landed byte is in its place.",
    "foreign": "Landed bytes are unchanged, and do not come from other memory.",
    "lost": "Acknowledged bytes have arrived.",
    "failed": "An operation succeeds if nothing goes wrong.",
    "hang": "Every call ends in time.",
    "crash": "No process crashes.",
    "busy-idle": "An idle process uses no CPU time.",
    "leak-memory": "Closed connections leave no memory behind.",
    "leak-descriptor": "Closed connections leave no descriptors behind.",
    "leak-thread": "Closed connections leave no threads behind.",
}


class WatchedMemory:
    """One process's memory, in equal slots, with each slot's allowed content.

    Args:
        writer: The number of the process, below 16.
        words: Its memory.
        slots: The number of slots that it is divided into.
    """

    def __init__(self, writer: int, words: Words, slots: int) -> None:
        self.writer = writer
        self.life: int = 0
        self.words: Words = words.reshape(slots, -1)
        self._places = np.arange(words.size, dtype=np.uint64).reshape(slots, -1)
        # One array for each content that a slot may have; no array while the slot is
        # lent.
        self._allowed: list[list[Words]] = [[] for _ in range(slots)]
        self._since = ["it was made"] * slots
        for slot in range(slots):
            self.write([slot])

    def write(self, slots: Sequence[int], since: str = "it was written") -> None:
        """Begin a new life of some slots, as the memory's owner.

        Args:
            slots: The slots.
            since: The event that ended the previous life, for the text about a late
                write.
        """
        self.life += 1
        for slot in slots:
            self.words[slot] = fresh = stamp(self.writer, self.life, self._places[slot])
            self._allowed[slot] = [fresh]
            self._since[slot] = since

    def content(self, slots: Sequence[int]) -> Words | None:
        """Return the expected content of some slots; None if it is unknown."""
        known = [self._allowed[slot] for slot in slots]
        if any(len(some) != 1 for some in known):
            return None
        return np.concatenate([some[0] for some in known])

    def lend(self, slots: Sequence[int]) -> None:
        """Allow any content in some slots until they are written or set."""
        for slot in slots:
            self._allowed[slot] = []

    def allow(self, slots: Sequence[int], words: Words) -> None:
        """Also allow these words in some slots, each in its place."""
        for slot, row in zip(slots, words.reshape(len(slots), -1), strict=True):
            self._allowed[slot].append(row)

    def set(self, slots: Sequence[int], words: Words) -> None:
        """Require these words in some slots from now on."""
        for slot, row in zip(slots, words.reshape(len(slots), -1), strict=True):
            self._allowed[slot] = [row]

    def view(self, slots: Sequence[int]) -> memoryview:
        """Return the bytes of adjacent slots."""
        return self.words[slots[0] : slots[-1] + 1].reshape(-1).view(np.uint8).data

    def found(self, slots: Sequence[int]) -> Words:
        """Return the current content of some slots."""
        return self.words[list(slots)].reshape(-1)

    def wrote(self, words: Words, slots: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return for each word whether it was written to these slots in any life.

        A word between two lives may consist of bytes of both.
        """
        names = _mixed(words, _UNMIX)
        lives = (names >> _HALF) - np.uint64(self.writer << _LIFE_BITS)
        places = self._places[list(slots)].reshape(-1)
        clean = names & _PLACES == places
        known = np.asarray(clean & (lives > 0) & (lives <= self.life), np.bool_)
        between = 1 + np.flatnonzero(~known[1:-1] & known[:-2] & known[2:])
        found = words[between].view(np.uint8)
        whole = np.zeros(found.size, np.bool_)
        for beside in (between - 1, between + 1):
            written = stamp(self.writer, lives[beside], places[between])
            whole |= found == written.view(np.uint8)
        known[between] = whole.reshape(-1, WORD_BYTES).all(axis=1)
        return known

    def watch(self) -> Wrong | None:
        """Compare every slot with its allowed content."""
        for slot, allowed in enumerate(self._allowed):
            if not allowed:
                continue
            if len(allowed) == 1:
                bad = self.words[slot] != allowed[0]
            else:  # a transfer that ended half-way may have ended within a word
                found = self.words[slot].view(np.uint8)
                bytes_of = [words.view(np.uint8) for words in allowed]
                wrong = np.logical_and.reduce([found != each for each in bytes_of])
                bad = wrong.reshape(-1, WORD_BYTES).any(axis=1)
            if bad.any():
                return self._late(slot, bad, len(allowed) > 1)
        return None

    def _late(self, slot: int, bad: npt.NDArray[np.bool_], mixed: bool) -> Wrong:
        where = np.flatnonzero(bad)
        word = int(self.words[slot][where[0]])
        text = f"{where.size * WORD_BYTES} bytes of slot {slot} of side {self.writer}"
        if mixed:
            text = f"{text} hold {described(word)}, which no put was to send"
            return Wrong("late-read", text)
        text = f"{text} changed after {self._since[slot]}: {described(word)}"
        return Wrong("late-write", text)


def landed(
    found: Words,
    expected: Words,
    blank: Words,
    source: WatchedMemory,
    slots: Sequence[int],
) -> Wrong | None:
    """Check words that a transport has reported as landed.

    Args:
        found: The content of the destination.
        expected: The content of the source when it was offered.
        blank: The previous content of the destination.
        source: The side that the bytes came from.
        slots: The slots of the source.
    """
    bad = np.flatnonzero(found != expected)
    if not bad.size:
        return None
    share = f"{bad.size * WORD_BYTES} of {found.size * WORD_BYTES} bytes that landed"
    if (found[bad] == blank[bad]).all():
        return Wrong("hole", f"{share} were never written")
    first = int(found[bad[0]])
    wanted = int(expected[bad[0]])
    text = f"{share} are wrong, first {described(first)} for {described(wanted)}"
    if source.wrote(found, slots)[bad].all():
        return Wrong("stale" if bad.size == found.size else "torn", text)
    if np.isin(found[bad], expected).all():
        return Wrong("misplaced", text)
    return Wrong("foreign", text)


def described(word: int) -> str:
    """Return a text about a word's origin."""
    writer, life, place = origin(word)
    return f"life {life} of side {writer} at word {place}"
