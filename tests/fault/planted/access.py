"""Bugs in what a peer may reach, and in what a stranger may say."""

from __future__ import annotations

from typing import Final

from tests.fault.planted.plant import Planted

_REACHED: Final = frozenset({"access", "stale", "place", "memory-range"})
_ACCEPTED: Final = frozenset({"tamper"})

BUGS: Final = (
    Planted(
        name="the generation of a grant is not looked at",
        module="kvwire.proto.regions",
        before="        if not region.open or not generation == row.generation == "
        "region.generation:\n",
        after="        if not region.open:\n",
        rules=_REACHED,
        seeds=3000,
    ),
    Planted(
        name="a closed region can still be reached",
        module="kvwire.proto.regions",
        before="        if not region.open or not generation == row.generation == "
        "region.generation:\n",
        after="        if generation != row.generation:\n",
        rules=_REACHED | {"KeyError"},
    ),
    Planted(
        # The sum wraps in C; llama.cpp's and Mooncake's advisories are of this kind.
        name="offset + length is compared after it has wrapped at 32 bits",
        module="kvwire.proto.regions",
        before="        if not 0 <= offset <= row.nbytes or not 0 <= nbytes <= "
        "row.nbytes - offset:\n",
        after="        if (offset + nbytes) % 2**32 > row.nbytes:\n",
        rules=_REACHED,
        seeds=3000,
    ),
    Planted(
        name="an access may go one byte beyond its grant",
        module="kvwire.proto.regions",
        before="nbytes <= row.nbytes - offset:\n",
        after="nbytes <= row.nbytes - offset + 1:\n",
        rules=_REACHED,
        seeds=3000,
    ),
    Planted(
        name="the range of a grant begins at the beginning of its region",
        module="kvwire.proto.onesided",
        before="            base=row.offset + body.offset,\n",
        after="            base=body.offset,\n",
        rules=_REACHED,
    ),
    Planted(
        name="what a grant allows is not looked at",
        module="kvwire.proto.regions",
        before="        if access & ~row.access:\n",
        after="        if access & ~row.access & ~row.region.access:\n",
        rules=_REACHED,
        seeds=3000,
    ),
    Planted(
        name="the token of a grant is not looked at",
        module="kvwire.proto.regions",
        before="        if row is None or not proven:\n",
        after="        if row is None:\n",
        rules=_REACHED,
        seeds=3000,
    ),
    Planted(
        name="a foreign grant gets another answer than a missing one",
        module="kvwire.proto.regions",
        before="        if row is None or not proven:\n",
        after="        if row is None:\n"
        '            raise AccessDenied("there is no such grant")\n'
        "        if not proven:\n",
        rules=frozenset({"oracle"}),
        seeds=3000,
    ),
    Planted(
        name="the proofs of a handshake cover its first message only",
        module="kvwire.proto.auth",
        before='    return hashlib.sha256(b"".join(messages)).digest()\n',
        after="    return hashlib.sha256(messages[0]).digest()\n",
        rules=frozenset({"handshake"}),
        seeds=3000,
    ),
    Planted(
        name="the client's proof is not looked at",
        module="kvwire.proto.handshake",
        before="        if not same(Confirm.decode(body).mac, expected):\n",
        after="        if not same(expected, expected):\n",
        rules=frozenset({"handshake"}),
        seeds=3000,
    ),
    Planted(
        name="both directions are sealed with one key",
        module="kvwire.proto.auth",
        before='expand(f"seal {role.name.lower()}")',
        after='expand("seal")',
        rules=_ACCEPTED,
        seeds=3000,
    ),
    Planted(
        name="a seal may be missing",
        module="kvwire.proto.framing",
        before="        if not hmac.compare_digest(seal, expected):\n",
        after="        if seal[:1] != expected[:1] and seal:\n",
        rules=_ACCEPTED,
        seeds=3000,
    ),
    Planted(
        name="a control body that came damaged is read",
        module="kvwire.proto.framing",
        before="            if zlib.crc32(body) != header.payload_check:\n",
        after="            if zlib.crc32(body) != header.payload_check and not body:\n",
        rules=_ACCEPTED | {"handshake"},
        seeds=3000,
    ),
    Planted(
        name="the sequence of frames is not looked at",
        module="kvwire.proto.framing",
        before="        if header.sequence != self.received & _SEQUENCE_MASK:\n",
        after="        if header.sequence > _SEQUENCE_MASK:\n",
        rules=_ACCEPTED | {"content", "order", "completion", "credit"},
        seeds=3000,
    ),
    Planted(
        name="an unknown type of frame is skipped",
        module="kvwire.proto.connection",
        before="        if header.type not in _CONTROL:\n            raise "
        "UnexpectedFrame(\n",
        after="        if header.type not in _CONTROL:\n"
        "            return ChunkArrival(ChunkPlace.NOWHERE, header)\n"
        "            raise UnexpectedFrame(\n",
        rules=_ACCEPTED,
        seeds=3000,
    ),
    Planted(
        name="a request number may be used again",
        module="kvwire.proto.requests",
        before="        if wire_id != self._next_theirs:\n",
        after="        if not self._is_theirs(wire_id):\n",
        rules=_ACCEPTED | {"place", "completion", "accused", "AssertionError"},
        seeds=3000,
    ),
    Planted(
        name="a frame for a request that never was is ignored",
        module="kvwire.proto.requests",
        before="        if request is None and not 0 < wire_id < due:\n",
        after="        if request is None and wire_id < 0 < due:\n",
        rules=_ACCEPTED,
        seeds=3000,
    ),
)
