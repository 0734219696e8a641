"""The thread of a lane: reads the peer's offered payloads, and reports them.

::

    waiting --post--> reading --all there--> read --word read, and alive--> reported

*A sender may end its half at any time*, and reuse its memory at once. The reader cannot
be stopped. Instead, the reader is made to detect it: each half has a word in its memory
that marks it as alive, and wipes that word *before* it ends. The reader reads payloads,
*then* the word, and reports the payloads only if the word is intact: in that case all
of their bytes were read while the sender still kept them. This is a sequence lock over
any fabric, and it also detects a peer that has died.

*With nothing in progress the thread sleeps* until the loop wakes it. Otherwise it
polls, with pauses that grow while nothing moves, since NIXL has no call that waits.

*An end waits for our own reads.* NIXL cannot cancel a read, so the memory that it may
still write to is released when the read has ended and the agent is closed. If the peer
is stopped, such memory stays in quarantine until the peer continues or dies.

*An end waits for a peer that may be connecting.* NIXL connects at the first use. If the
other agent is closed meanwhile, and both are on one host, UCX aborts the connecting
process ("stubs.c: Assertion `0' failed": NIXL 1.5.1). So a half whose address the peer
knows stays open until a note from the peer has arrived, or for a limited time. Nothing
helps against a peer that is killed at that moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from kvwire.backend import Landing
from kvwire.backend.completion_queue import CompletionQueue
from kvwire.backend.pacing import open_epolls, unpace
from kvwire.errors import (
    BackendUnavailable,
    ConnectionLost,
    KVWireError,
    begin_thread,
)
from kvwire.kv.fragments import Fragments
from kvwire.memory.copy import as_fragments, copy, paired
from kvwire_nixl.library import NixlAgent, Rows, rows
from kvwire_nixl.ranges import NixlSlot, NixlSlots
from kvwire_nixl.settings import NixlSettings
from kvwire_nixl.wire import BYE, WORD_BYTES, LaneProofs, NixlBootstrap, NixlPlace

_log = logging.getLogger("kvwire.nixl")

# The most reads handed to NIXL at once: enough that the next one is there when one has
# ended, and few enough that an end has little to wait for.
READS_MAX: Final = 4
# The time between two polls: a share of the time since the last progress, so that an
# end is detected at most that much later. It ranges from a fraction of a small read's
# duration to a value at which polling costs one percent of a core.
_LOOK_SHARE: Final = 1 / 8
_LOOK_S: Final = 20e-6
_LOOK_S_MAX: Final = 2e-3
# While the peer still has to read some of our payloads, its word is read at this
# interval.
_WORD_S: Final = 0.1

# Connecting takes some 10 ms; the limit is far longer, because the machine may be busy.
_LINGER_S: Final = 0.5

_PAGE_BYTES: Final = 4096
# Our word is at the start of the page; the peer's word is read to this offset.
_THEIRS: Final = 64
_PEER_HAS_ENDED: Final = "nixl: the peer has ended its half of the lane"


class NixlRead:
    """A read of one of the peer's payloads."""

    __slots__ = ("handle", "is_direct", "landing", "place", "slot")

    def __init__(self, landing: Landing, place: NixlPlace, *, is_direct: bool) -> None:
        self.landing: Landing = landing
        self.place: NixlPlace = place
        self.is_direct: bool = is_direct  # whether NIXL may write to the landing itself
        self.slot: NixlSlot | None = None
        self.handle: int | None = None


class NixlDriver:
    """Runs one half of a lane, on a thread.

    Args:
        settings: The agent's settings.
        own: The half's bootstrap, while it has no agent.
        proofs: Makes and checks proofs of the lane's secret.
        name: The thread's name.
        call_soon: Schedules a call on the loop, from any thread; raises RuntimeError
            once the loop is closed.
        joined: Called on the loop when the agent exists and, on a client, the peer's
            agent was reached; or with the error.
        received: Called on the loop with payloads that are in place.
        sent: Called on the loop with the total number of payloads that the peer has
            read.
        gone: Called on the loop as the last callback, when no memory is touched any
            more, with the error that ended the half, or None.

    Attributes:
        agent: The agent, after ``joined``.
        own: The bootstrap; after ``joined`` it includes the agent's address.
    """

    agent: NixlAgent

    def __init__(  # noqa: PLR0913
        self,
        settings: NixlSettings,
        own: NixlBootstrap,
        proofs: LaneProofs,
        name: str,
        *,
        call_soon: Callable[[Callable[[], None]], object],
        joined: Callable[[Exception | None], None],
        received: Callable[[list[Landing]], None],
        sent: Callable[[int], None],
        gone: Callable[[Exception | None], None],
    ) -> None:
        self._settings = settings
        self.own: NixlBootstrap = own
        self._proofs = proofs
        self._completions = CompletionQueue(
            call_soon, received, lambda landing: landing.length
        )
        self._on_joined = joined
        self._on_sent = sent
        self._on_gone = gone
        self._page = NixlSlot(_PAGE_BYTES)
        # Guards the fields that both threads use; notified when the loop has changed
        # them.
        self._changed = threading.Condition()
        self._inbox: deque[NixlRead] = deque()
        self._offered = 0
        self._closing = False
        self._ending = False
        self._error: Exception | None = None
        # Fields that only the thread uses.
        self._peer: NixlBootstrap | None = None
        self._made = False
        self._epolls: frozenset[int] = frozenset()
        self._joined = False
        self._waiting: deque[NixlRead] = deque()
        self._reading: deque[NixlRead] = deque()
        self._read: list[NixlRead] = []
        self._confirming: list[NixlRead] = []
        self._confirmed = 0
        self._taken = 0
        self._was_notified = False
        self._word_handle: int | None = None
        self._word_posted = False
        self._word_at = 0.0
        self._moved_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # --- calls from the lane ----------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which creates the agent."""
        begin_thread(self._thread)

    def meet(self, peer: NixlBootstrap) -> None:
        """Continue with this peer; ``joined`` reports the result."""
        with self._changed:
            self._peer = peer
            self._changed.notify()

    def read(self, reads: list[NixlRead], offered: int = 0) -> None:
        """Add reads; ``offered`` is the total of payloads offered to the peer."""
        with self._changed:
            self._inbox += reads  # bounded: LANE_PAYLOADS_MAX
            self._offered = max(self._offered, offered)
            self._changed.notify()

    def close(self) -> None:
        """End once nothing is left to do; ``gone`` reports it."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def end(self, error: Exception | None = None) -> None:
        """End now; ``gone`` reports when memory is free.

        Only the first error counts.
        """
        with self._changed:
            if not self._ending:
                self._ending = True
                self._error = error
                self._changed.notify()

    # --- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._join()
            while self._is_busy():
                if self._turn():
                    self._moved_at = time.monotonic()
                else:
                    self._rest()
        except Exception as exc:  # noqa: BLE001 - whatever NIXL raises
            self.end(exc)
        self._quiesce()
        self._completions.leave(self._leave)

    def _join(self) -> None:
        page = self._page.range
        others = open_epolls()
        self.agent = NixlAgent(self._settings, self.own.agent)
        self._epolls = open_epolls() - others
        self._made = True
        self.agent.register(page.address, page.nbytes)
        self._slots = NixlSlots(self.agent)
        self._page.memory[:WORD_BYTES] = self._proofs.word()
        metadata = self.agent.describe(page.address, page.nbytes, connection=True)
        self.own = dataclasses.replace(self.own, word=page.address, metadata=metadata)
        with self._changed:
            while not (self._peer or self._ending):
                self._changed.wait()
        peer = self._peer
        if peer is not None and peer.metadata:
            self._learn((peer.metadata,), peer.word)
            # With a note, so that another note is in flight if this half should end
            # soon.
            self._post_word(self._proofs.note(0))
            self._moved_at = time.monotonic()
            while not self._ending and not self._word_is_there():
                self._rest()
        if not self._ending:
            self._joined = True
            self._completions.on_loop(lambda: self._on_joined(None))

    def _learn(self, news: tuple[bytes, ...], word: int) -> None:
        """Load the peer's descriptions of memory; prepare to read its word."""
        assert self._peer is not None
        for each in news:
            self.agent.learn(each, self._peer.agent)
        if self._word_handle is None and word:
            self._word_handle = self.agent.prepare(
                _one_row(self._page.range.address + _THEIRS), _one_row(word)
            )

    def _is_busy(self) -> bool:
        """Sleep until there is work, and return True; return False at the end."""
        with self._changed:
            while not self._ending:
                self._waiting += self._inbox  # bounded: LANE_PAYLOADS_MAX
                self._inbox.clear()
                ours = self._waiting or self._reading or self._read or self._word_posted
                if ours or self._taken < self._offered:
                    return True
                if self._closing:
                    self._ending = True
                else:
                    self._changed.wait()
                    self._moved_at = time.monotonic()
            return False

    def _turn(self) -> bool:
        """Move as much as possible; return whether anything moved."""
        moved = self._post_reads()
        moved |= self._collect()
        moved |= self._read_notes()
        try:
            return moved | self._confirm()
        except ConnectionLost:
            # After a peer has read everything it may end, and wipe its word, while we
            # read the word.
            self._read_notes()
            unread = self._waiting or self._reading or self._read or self._confirming
            if unread or self._taken < self._offered:
                raise
            self._word_posted = False
            return True

    def _post_reads(self) -> bool:
        posted = False
        while self._waiting and len(self._reading) < READS_MAX and not posted:
            read = self._waiting.popleft()
            self._reading.append(read)  # bounded: READS_MAX
            self._post(read)
            posted = True
        return posted

    def _post(self, read: NixlRead) -> None:
        self._learn(read.place.news, read.place.word)
        nbytes = read.landing.length
        if read.landing.payload is None or not nbytes:
            return
        if read.is_direct:
            place = read.place
            theirs = Fragments(
                place.addresses, place.lengths, owner=None, writable=False
            )
            there, here, lengths = paired(theirs, as_fragments(read.landing.payload))
            local = rows(here, lengths)
            remote = rows(there, lengths)
        else:
            read.slot = self._slots.take(nbytes)
            remote = rows(read.place.addresses, read.place.lengths)
            local = remote.copy()
            ends = np.cumsum(read.place.lengths, dtype=np.uint64)
            local[:, 0] = np.uint64(read.slot.range.address) + ends - local[:, 1]
        handle = self.agent.prepare(local, remote)
        read.handle = handle
        self.agent.post(handle)

    def _collect(self) -> bool:
        """Complete reads that have ended, in the order of sending."""
        moved = False
        while self._reading:
            read = self._reading[0]
            if read.handle is not None:
                if not self.agent.is_done(read.handle):
                    break
                self.agent.release(read.handle)
                read.handle = None
            if read.slot is not None and read.landing.payload is not None:
                copy(read.slot.memory[: read.landing.length], read.landing.payload)
                self._slots.give_back(read.slot)
            self._reading.popleft()
            moved = True
            self._read.append(read)  # bounded: LANE_PAYLOADS_MAX
        return moved

    def _confirm(self) -> bool:
        """Report payloads as received if the peer was alive after the reads."""
        if self._word_posted:
            if not self._word_is_there():
                return False
            done = self._confirming
            self._confirming = []
            self._completions.put(read.landing for read in done)
            return True
        late = time.monotonic() > self._word_at + _WORD_S
        looks = late and self._taken < self._offered and self._word_handle is not None
        if self._read or looks:
            self._confirming = self._read
            self._read = []
            self._confirmed += len(self._confirming)
            self._post_word(self._proofs.note(self._confirmed))
            return True
        return False

    def _post_word(self, note: bytes = b"") -> None:
        assert self._word_handle is not None
        self._word_posted = True
        self._word_at = time.monotonic()
        self.agent.post(self._word_handle, note)

    def _word_is_there(self) -> bool:
        """Return whether the peer's word has been read.

        Raises:
            ConnectionLost: The word is wiped, so the peer has ended.
        """
        assert self._word_handle is not None
        if not self.agent.is_done(self._word_handle):
            return False
        self._word_posted = False
        word = bytes(self._page.memory[_THEIRS : _THEIRS + WORD_BYTES])
        if word != self._proofs.word(of_peer=True):
            raise ConnectionLost(_PEER_HAS_ENDED)
        self._unpace()
        return True

    def _read_notes(self) -> bool:
        """Handle the peer's notes about the payloads it has read."""
        if self._taken >= self._offered:
            return False
        notes = self.agent.notes()
        self._was_notified |= bool(notes)
        taken, bye = self._proofs.read_notes(notes)
        if bye and taken < self._offered:
            raise ConnectionLost(_PEER_HAS_ENDED)
        if not self._taken < taken <= self._offered:
            return False
        self._taken = taken
        self._unpace()
        self._completions.on_loop(lambda: self._on_sent(taken))
        return True

    def _unpace(self) -> None:
        """Turn off TCP pacing, once, after the agents have connected."""
        if self._epolls:
            unpace(self._epolls)
            self._epolls = frozenset()

    def _rest(self) -> None:
        """Wait for the next poll, or until the loop has a request."""
        share = (time.monotonic() - self._moved_at) * _LOOK_SHARE
        with self._changed:
            if not (self._ending or self._inbox):
                self._changed.wait(min(max(share, _LOOK_S), _LOOK_S_MAX))

    # --- the end ----------------------------------------------------------------------

    def _quiesce(self) -> None:
        """Release all memory: wipe our word, wait for reads, and close the agent."""
        if not self._made:
            return
        self._page.memory[:WORD_BYTES] = bytes(WORD_BYTES)
        if self._word_handle is not None:
            with contextlib.suppress(KVWireError):
                self.agent.send_note(self._proofs.note(BYE))
        began = time.monotonic()
        warned = False
        for read in self._reading:
            while read.handle is not None and not self._is_over(read.handle):
                if not warned and time.monotonic() > began + 1:
                    warned = True
                    _log.warning(
                        "%s: a read from a silent peer cannot be cancelled; its "
                        "memory stays in quarantine until the read ends",
                        self._thread.name,
                    )
                time.sleep(_LOOK_S_MAX)
        self._linger()
        # This read writes to the driver's own page, so nobody else has to wait for it.
        if self._word_handle is not None:
            with contextlib.suppress(KVWireError):
                self.agent.release(self._word_handle)
        self.agent.close()

    def _linger(self) -> None:
        """Wait until a peer that knows our address has connected, as its notes show."""
        connects_itself = self._peer is not None and bool(self._peer.metadata)
        if connects_itself and not self._offered:
            return  # no peer knows our address
        until = time.monotonic() + _LINGER_S
        with contextlib.suppress(KVWireError):
            while not (self._was_notified or time.monotonic() > until):
                self._was_notified = bool(self.agent.notes())
                time.sleep(_LOOK_S_MAX)

    def _is_over(self, handle: int) -> bool:
        try:
            return self.agent.is_done(handle)
        except KVWireError:
            # it failed: closing the agent proves that it no longer moves anything
            return True

    def _leave(self) -> None:
        """Report the end to the lane."""
        if not self._joined:
            error = self._error or BackendUnavailable("the lane was aborted")
            self._on_joined(error)
        self._on_gone(self._error)


def _one_row(address: int) -> Rows:
    return np.array([[address, WORD_BYTES, 0]], np.uint64)
