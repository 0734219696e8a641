"""Bugs in completions, credit, order and liveness."""

from __future__ import annotations

from typing import Final

from tests.fault.planted.plant import Planted

BUGS: Final = (
    Planted(
        # cpython#86296, asyncpg PR 468: a completion that goes with whoever waited.
        name="a cancel takes a request away without its completion",
        module="kvwire.proto.connection",
        before="        self._abandon(request, error, WireCode.CANCELLED)\n"
        "        self._settle()\n\n    def withdraw",
        after="        self._abandon(request, error, WireCode.CANCELLED)\n"
        "        self.outbox.events.clear()\n"
        "        self._settle()\n\n    def withdraw",
        rules=frozenset({"completion"}),
    ),
    Planted(
        name="a request is completed twice",
        module="kvwire.proto.requests",
        before="        if request.over:\n            return\n        "
        "request.advance(RequestInput.FAIL)\n",
        after="        request.state = RequestStage.FAILED\n",
        rules=frozenset({"completion", "AssertionError", "UnexpectedFrame", "untrue"}),
    ),
    Planted(
        name="credit is returned twice",
        module="kvwire.proto.credits",
        before="        self.due_messages = self.due_bytes = 0\n        return",
        after="        self.due_bytes = 0\n        return",
        rules=frozenset({"credit", "accused", "FlowControlViolation"}),
    ),
    Planted(
        name="credit is not returned for a message that came damaged",
        module="kvwire.proto.messages",
        before="        self._taken(waiting.nbytes)\n        if waiting.error:\n",
        after="        if not waiting.error:\n"
        "            self._taken(waiting.nbytes)\n"
        "        if waiting.error:\n",
        rules=frozenset({"credit"}),
    ),
    Planted(
        name="a message may be sent without credit for it",
        module="kvwire.proto.credits",
        before="        if self.messages < 1 or self.nbytes < nbytes:\n",
        after="        if self.messages < 0 or self.nbytes < nbytes:\n",
        rules=frozenset({"credit", "accused"}),
    ),
    Planted(
        name="the newest message is received first",
        module="kvwire.proto.messages",
        before="            del queue[waiting]\n            self._trim(tag)\n",
        after="            waiting, _ = queue.popitem()\n            self._trim(tag)\n",
        rules=frozenset({"order", "content", "completion", "limit"}),
    ),
    Planted(
        name="a receive that is too small takes the message with it",
        module="kvwire.proto.messages",
        before='                end = "it waits for a larger buffer"\n',
        after='                end = "it is gone"\n'
        "                del queue[waiting]\n                self._trim(tag)\n",
        rules=frozenset({"KeyError", "ValueError", "credit", "completion"}),
    ),
    Planted(
        name="the size that a sender announces is believed",
        module="kvwire.proto.messages",
        before="            fits = waiting.nbytes <= request.nbytes\n",
        after="            fits = not request.buffer or (\n"
        "                waiting.nbytes <= request.nbytes)\n",
        rules=frozenset({"limit"}),
    ),
    Planted(
        name="a movement ends when its last chunk is under way",
        module="kvwire.proto.chunks",
        before="        if request.moved < request.nbytes:\n            return\n"
        "        request.advance(RequestInput.MOVED)\n        if request.kind",
        after="        if request.moved + self._chunk_bytes <= request.nbytes:\n"
        "            return\n"
        "        request.advance(RequestInput.MOVED)\n        if request.kind",
        rules=frozenset({"completion", "UnexpectedFrame", "accused"}),
    ),
    Planted(
        name="damage to a chunk is not looked at",
        module="kvwire.proto.chunks",
        before="        if not intact:\n",
        after="        if not intact and arrival.length < 0:\n",
        rules=frozenset({"completion", "content"}),
        seeds=3000,
    ),
    Planted(
        name="damage to a segment is not looked at",
        module="kvwire.proto.transfers",
        before="            segment.damaged = True\n        if segment.moved",
        after="            segment.damaged = False\n        if segment.moved",
        rules=frozenset({"completion"}),
        seeds=3000,
    ),
    Planted(
        name="a commit may close a gap",
        module="kvwire.proto.transfers",
        before="        if transfer.committed and not transfer.open_segments:\n",
        after="        if transfer.committed:\n",
        rules=frozenset({"completion", "kv", "accused"}),
    ),
    Planted(
        name="our own stall is blamed on the peer",
        module="kvwire.proto.liveness",
        before="        stalled = late_s > STALL_TOLERANCE_S\n",
        after="        stalled = late_s < 0\n",
        rules=frozenset({"blame"}),
        seeds=3000,
    ),
    Planted(
        name="a side that only receives is not heard of",
        module="kvwire.proto.connection",
        before="        if self._keepalive.is_due(now, frames_sent) or asks:\n",
        after="        if self._keepalive.is_due(now, frames_sent) and asks or asks:\n",
        rules=frozenset({"blame"}),
    ),
    Planted(
        name="a silent peer is pinged for ever",
        module="kvwire.proto.connection",
        before="        if verdict is LivenessVerdict.DEAD:\n",
        after="        if verdict is None:\n",
        rules=frozenset({"liveness", "detection"}),
        seeds=3000,
    ),
    Planted(
        name="closing does not wake who waits for a message",
        module="kvwire.proto.connection",
        before="        for request in self.messages.posted + "
        "self.transfers.unanswered:\n",
        after="        for request in self.transfers.unanswered:\n",
        rules=frozenset({"close", "completion", "untrue"}),
    ),
    Planted(
        name="the end of a connection forgets who waits for a message",
        module="kvwire.proto.requests",
        before="        yield from list(self._unmatched.values())\n",
        after="",
        rules=frozenset({"completion", "closed"}),
    ),
    Planted(
        name="CLOSE is answered before everything is delivered",
        module="kvwire.proto.connection",
        before="        if len(self._requests):\n            return\n",
        after="        if len(self._requests) and self.phase is CloseState.FLUSHING:\n"
        "            return\n",
        rules=frozenset({"untrue", "closed", "liveness", "AssertionError"}),
    ),
    Planted(
        name="a close that the peer does not finish waits for ever",
        module="kvwire.proto.connection",
        before="        if self._close_by is not None and now >= self._close_by:\n",
        after="        if self._close_by is not None and now < 0:\n",
        rules=frozenset({"timer", "liveness"}),
    ),
    Planted(
        name="deadlines are not kept",
        module="kvwire.proto.requests",
        before="            if _stands(entry):\n                due.append(entry[2])\n",
        after="            if entry[2].wire_id and _stands(entry):\n"
        "                due.append(entry[2])\n",
        rules=frozenset({"deadline"}),
    ),
    Planted(
        name="the peer is not told of a cancel",
        module="kvwire.proto.requests",
        before="        if tell is not None and request.wire_id is not None:\n",
        after="        if tell is WireCode.STALE and request.wire_id is not None:\n",
        rules=frozenset({"accused", "liveness", "untrue", "place", "completion"}),
        seeds=3000,
    ),
    Planted(
        name="something is said after the end",
        module="kvwire.proto.outbox",
        before="        if self.shut:\n            return\n",
        after="",
        rules=frozenset({"closed"}),
        seeds=3000,
    ),
)
