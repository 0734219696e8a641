"""Bugs in when memory is free: the kind that corrupts silently in the field."""

from __future__ import annotations

from typing import Final

from tests.fault.planted.plant import Planted

_TOUCHED: Final = frozenset({"memory-reuse", "drained", "AssertionError", "KeyError"})

BUGS: Final = (
    Planted(
        # SGLang #24527: decode aborts and its pages are reused while a write is flying.
        name="an abort frees memory without waiting for the link",
        module="kvwire.proto.connection",
        before="        self.outbox.shut = True\n",
        after="        self.outbox.shut = True\n        self.chunks.link_gone()\n",
        rules=_TOUCHED,
    ),
    Planted(
        # SGLang #38961: the timeout path frees as well.
        name="a timeout frees the memory of its request",
        module="kvwire.proto.connection",
        before="            self._abandon(request, RequestTable.expired(request), "
        "WireCode.DEADLINE)\n",
        after="            self._abandon(request, RequestTable.expired(request), "
        "WireCode.DEADLINE)\n"
        "            while request.buffer and self.holds.held(request.buffer):\n"
        "                self.holds.drop(request.buffer)\n",
        rules=_TOUCHED,
    ),
    Planted(
        name="retired memory drains although it is held",
        module="kvwire.proto.holds",
        before="        if held:\n            self.retired",
        after="        if held and held > 1:\n            self.retired",
        rules=_TOUCHED,
    ),
    Planted(
        name="memory is not held while a payload lands in it",
        module="kvwire.proto.chunks",
        before="        self._holds.take(buffer)\n",
        after="",
        rules=_TOUCHED,
    ),
    Planted(
        name="memory is not held while the link reads it",
        module="kvwire.proto.chunks",
        before="        self._holds.take(chunk.buffer)\n",
        after="",
        rules=_TOUCHED,
    ),
    Planted(
        name="a put that is confirmed early ends before the link is through with it",
        module="kvwire.proto.onesided",
        before="            request.confirmed = True\n            return\n",
        after="            request.advance(RequestInput.MOVED)\n",
        rules=frozenset({"completion", "UnexpectedFrame", "memory-reuse"}),
    ),
    Planted(
        name="what was landing when the link died stays held for ever",
        module="kvwire.proto.chunks",
        before="        for arrival in [a for a in self._landing if not a.lane]:\n"
        "            self.release(arrival)\n",
        after="",
        rules=frozenset({"drained"}),
    ),
    Planted(
        name="what was being sent when the link died stays held for ever",
        module="kvwire.proto.chunks",
        before="            chunk.mover.in_flight -= 1\n"
        "            self._holds.drop(chunk.buffer)\n",
        after="            chunk.mover.in_flight -= 1\n",
        rules=frozenset({"drained"}),
    ),
    Planted(
        name="a closed region goes on being written and read",
        module="kvwire.proto.onesided",
        before="            if request.kind in SERVING and request.region == region:\n",
        after="            if request.kind in SERVING and request.region != region:\n",
        rules=frozenset({"stale", "KeyError", "AssertionError", "drained"}),
        seeds=3000,
    ),
    Planted(
        name="an eager message is handed over before all of it is here",
        module="kvwire.proto.messages",
        before="            if not waiting.whole:\n                return\n",
        after="",
        rules=frozenset({"completion", "KeyError", "memory-reuse"}),
    ),
    Planted(
        name="the memory of a transfer is retired when it fails, and never drained",
        module="kvwire.proto.transfers",
        before="        assert request.over\n        buffers = self.retire(request)\n",
        after="        assert request.over\n        buffers = []\n",
        rules=frozenset({"drained"}),
    ),
)
