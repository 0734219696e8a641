"""Whether what a get from a window says is true, and its bytes those that were offered.

A generation names content, so that a block which has landed under one needs no look at
its owner: its bytes are the right ones, or they are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.proto.chunks import Chunk
from kvwire.proto.events import RequestDone
from kvwire.wire.control import WindowGot
from tests.programs.sim.app_windows import unpacked
from tests.programs.sim.ask import Ask
from tests.programs.sim.memory import content, demand

if TYPE_CHECKING:
    from tests.programs.sim.endpoint import Endpoint
    from tests.programs.sim.world import World


class WindowJudge:
    """Compares what a reader has with what its owner has offered."""

    def __init__(self, world: World) -> None:
        self._world = world

    def leaves(self, endpoint: Endpoint, chunk: Chunk) -> None:
        """A chunk of a get is handed to the wire: of the blocks that it names?"""
        serving = endpoint.serving.get(chunk.request)
        demand(serving, "completion", "a get sends bytes after its end")
        assert serving is not None
        demand(chunk.buffer == serving.buffer, "place", "a chunk of other blocks")
        demand(chunk.offset == chunk.position, "place", "a chunk beside its blocks")

    def served(self, endpoint: Endpoint, event: RequestDone) -> None:
        """A get is over on its owner's side: for the first time?"""
        number = event.request.wire_id
        demand(number not in endpoint.served, "completion", "a get was served twice")
        endpoint.served.add(number)
        serving = endpoint.serving.pop(event.request, None)
        if event.error is None and serving is not None:
            held = endpoint.node.holds.held(serving.buffer)
            demand(not held, "memory-reuse", "a get is over, and the link reads on")

    def got(self, ask: Ask) -> None:
        """A get has ended well: each block has landed, or the owner renewed it."""
        window, ticket, answer = ask.window, ask.ticket, ask.core.answer
        assert window is not None
        assert ticket is not None
        count, block_bytes = len(ticket.generations), window.block_bytes
        stale, data = [False] * count, b""
        if isinstance(answer, WindowGot):
            stale = unpacked(answer.stale, count)
            if answer.sent:
                demand(ask.covered == ask.nbytes or ask.core.damaged, *_EARLY)
                assert ask.lease is not None
                data = ask.lease.load(0, ask.nbytes)
                demand(ask.core.damaged or data == ask.read, "content", "other bytes")
            else:
                demand(any(stale), "untrue", "nothing is sent, for no reason")
                demand(not ask.covered, "untrue", "bytes of a get that sent none")
        else:
            demand(isinstance(answer, bytes), "completion", "a get without an answer")
            assert isinstance(answer, bytes)
            data = answer
        for is_stale, renewed in zip(stale, window.stale(ticket), strict=True):
            demand(renewed or not is_stale, "untrue", "a block that is as offered")
        if ask.core.damaged:
            demand(ask.endpoint.end.into.damaged, "untrue", "damage that never was")
            self._note(ask, "damaged")
            return
        if not data:
            self._note(ask, "all stale")
            return
        for block, generation in enumerate(ticket.generations):
            if not stale[block]:
                begin = block * block_bytes
                demand(
                    data[begin : begin + block_bytes]
                    == content(block_bytes, generation),
                    "stale-block",
                    "a block has landed with other bytes than were offered",
                )
        self._note(ask, "some stale" if any(stale) else "landed")

    def settled(self, endpoint: Endpoint) -> None:
        """The connection is over: neither side has a window of it."""
        left = endpoint.shown or endpoint.opened or endpoint.serving
        demand(not left, "window", f"{endpoint.name} has windows: {left}")

    def _note(self, ask: Ask, what: str) -> None:
        together = "" if isinstance(ask.core.answer, WindowGot) else " together"
        self._world.note(ask.endpoint.name, "blocks", what + together)


_EARLY = ("completion", "a get ends before all bytes are in place")


def refused(ask: Ask) -> bool:
    """Whether the owner has really refused a request for a window."""
    peer = ask.endpoint.peer
    return peer is not None and ask.core.wire_id in peer.refused


def has_no_window(ask: Ask) -> bool:
    """Whether a get names a window that is closed, on either side."""
    opened = ask.opened
    return opened is not None and (opened.closed or opened.window.closed)
