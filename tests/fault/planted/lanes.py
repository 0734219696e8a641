"""Bugs in what becomes of payload on lanes."""

from __future__ import annotations

from typing import Final

from tests.fault.planted.plant import Planted

_MODULE: Final = "kvwire.proto.lanes"

BUGS: Final = (
    Planted(
        name="memory is given back when the peer has it, and the lane still reads it",
        module=_MODULE,
        before="        if not chunk.quiet or "
        "(chunk.taken is None and not self._ended):\n",
        after="        if chunk.taken is None and not self._ended:\n",
        rules=frozenset({"drained", "memory-reuse", "KeyError"}),
    ),
    Planted(
        name="what was sent on a half that broke counts as arrived",
        module=_MODULE,
        before="            chunk.quiet = True\n"
        "            self._release(lane, chunk)\n\n",
        after="            chunk.quiet = True\n"
        "            self._fate_known(lane, chunk.index, taken=True)\n\n",
        rules=frozenset({"accused", "stuck", "KeyError"}),
    ),
    Planted(
        name="with the control link the memory on lanes is given back",
        module=_MODULE,
        before="            for chunk in list(lane.waiting.values()):\n"
        "                self._release(lane, chunk)\n",
        after="            for chunk in list(lane.waiting.values()):\n"
        "                chunk.quiet = True\n"
        "                self._release(lane, chunk)\n",
        rules=frozenset({"memory-reuse", "KeyError"}),
    ),
    Planted(
        name="an arrival on a lane that broke counts as one that came",
        module="kvwire.proto.chunks",
        before="            arrival.request.arrived.forget(number)\n",
        after="            assert number >= 0\n",
        rules=frozenset({"accused"}),
    ),
    Planted(
        name="a chunk that was missed is not sent again",
        module=_MODULE,
        before="            self._flows.chunk_missed(chunk)\n",
        after="            self._flows.chunk_sent(chunk)\n",
        rules=frozenset({"stuck", "accused"}),
    ),
    Planted(
        name="the newest payload that has arrived confirms those before it",
        module=_MODULE,
        before="        while lane.received in lane.beyond:\n"
        "            lane.beyond.remove(lane.received)\n"
        "            lane.received += 1\n",
        after="        lane.received = max(lane.received, arrival.index + 1)\n",
        rules=frozenset({"accused", "stuck", "KeyError", "drained", "memory-reuse"}),
    ),
    Planted(
        name="a half that broke names payloads as missed that had arrived",
        module=_MODULE,
        before="        missed, lane.missed = tuple(lane.missed), []\n",
        after="        missed = tuple(lane.missed) or tuple(lane.beyond)\n",
        rules=frozenset({"accused"}),
    ),
    Planted(
        name="a lane is forgotten before its peer has said that it is gone",
        module=_MODULE,
        before="self.stage is LaneStage.CLOSED and self.peer_closed "
        "and not self.waiting\n",
        after="self.stage is LaneStage.CLOSED and not self.waiting\n",
        rules=frozenset({"accused"}),
    ),
)
