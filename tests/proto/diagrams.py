"""The state diagrams of docs/topics/protocol.md, made from the tables of the code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvwire.proto.handshake import TRANSITIONS, HandshakeState
from kvwire.proto.state import (
    CLOSE_TRANSITIONS,
    FIRST_STATE,
    REQUEST_TRANSITIONS,
    TERMINAL,
    CloseState,
    RequestInput,
    RequestKind,
    RequestStage,
)
from kvwire.types import Role

Edge = tuple[str, str, str]
"""From, what happens, to; the start and the end are "[*]"."""


def diagrams() -> dict[str, str]:
    """Every diagram by its name; kinds of request that go the same way share one."""
    drawn = {
        f"handshake {role.name.lower()}": _drawn(_handshake(role)) for role in Role
    }
    alike: dict[str, list[str]] = {}
    for kind in RequestKind:
        alike.setdefault(_drawn(_request(kind)), []).append(kind.value)
    drawn |= {", ".join(kinds): drawing for drawing, kinds in alike.items()}
    drawn["connection"] = _drawn(_connection())
    return drawn


def _drawn(edges: Iterable[Edge]) -> str:
    lines = (f"    {a} --> {b}" + (f": {what}" if what else "") for a, what, b in edges)
    return "\n".join(["stateDiagram-v2", *lines, ""])


def _handshake(role: Role) -> Iterator[Edge]:
    steps = {old: new for (whose, old), new in TRANSITIONS.items() if whose is role}
    first = next(old for old in steps if old not in steps.values())
    yield "[*]", "", first.name
    for old, new in steps.items():
        # A state that waits for a frame is named after it; the last one is the front's.
        decided = old is HandshakeState.DECISION
        yield old.name, "decided" if decided else f"{old.name} received", new.name
        yield old.name, "disagrees, or REFUSE", HandshakeState.FAILED.name
    yield HandshakeState.DONE.name, "", "[*]"
    yield HandshakeState.FAILED.name, "", "[*]"


def _request(kind: RequestKind) -> Iterator[Edge]:
    steps = [step for step in REQUEST_TRANSITIONS.items() if step[0][0] is kind]
    good = [step for step in steps if step[0][2] is not RequestInput.FAIL]
    reached = {FIRST_STATE[kind], *(new for _, new in good)}
    failing = [step for step in steps if step not in good and step[0][1] in reached]
    yield "[*]", "", FIRST_STATE[kind].name
    for (_, old, what), new in good + failing:
        yield old.name, what.value, new.name
    for state in RequestStage:
        if state in TERMINAL:
            yield state.name, "", "[*]"


def _connection() -> Iterator[Edge]:
    yield "[*]", "", CloseState.OPEN.name
    for (old, what), new in CLOSE_TRANSITIONS.items():
        # Asking again, and a link that ends after everything, change nothing.
        if old is not new:
            yield old.name, what.value, new.name
    yield CloseState.CLOSED.name, "", "[*]"
