"""Connections with lanes of inproc beside a link over tcp.

Everything between them and the application is real.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

import kvwire
from kvwire.aio import Upkeep
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.driver.lanes import setup
from kvwire.limits import KIB, MIB
from kvwire.types import TransportReport
from kvwire_inproc import InprocBackend
from kvwire_inproc.lane import InprocLane
from tests.support.pairs import Pair

# Long after any test.
NEVER_S: Final = 1e6
CHUNK: Final = 64 * KIB
DATA: Final = bytes(range(256)) * (MIB // 256)
BESIDE: Final[dict[str, Any]] = {"prefer": ("inproc", "tcp"), "chunk_bytes": CHUNK}
ONLY: Final[dict[str, Any]] = {"require": ("inproc",), "chunk_bytes": CHUNK}


class HangingLane(InprocLane):
    """A lane that never opens."""

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        await asyncio.Event().wait()


async def expect_moves(pair: Pair) -> None:
    """A put, a get and a message of many chunks, both ways."""
    memory = bytearray(len(DATA))
    for near, far, owner in (
        (pair.left, pair.right, pair.far),
        (pair.right, pair.left, pair.near),
    ):
        region = owner.register(memory, "readwrite")
        grant = region.grant(far)
        memory[:] = bytes(len(DATA))
        await near.put(DATA, grant)
        assert memory == DATA
        into = bytearray(len(DATA))
        await near.get(grant, into=into)
        assert into == DATA
        sent = near.send(7, DATA)
        assert await far.recv(7) == DATA
        await sent
        await region.close()


def is_over(end: kvwire.Connection, transport: str) -> bool:
    return end.transport == transport


def reasons(report: TransportReport) -> dict[str, str]:
    """Why each transport that was not taken was not."""
    return {c.name: c.reason for c in report if not c.taken}


def use(monkeypatch: pytest.MonkeyPatch, lane: type[Lane], role: str) -> None:
    """Let one side, or both, make lanes of a class."""

    def open_lane(_: InprocBackend, context: LaneContext) -> Lane:
        mine = role in ("both", context.role.name.lower())
        return (lane if mine else InprocLane)()

    monkeypatch.setattr(InprocBackend, "open_lane", open_lane)


def impatient(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Give a lane only a share of the time in which all have to be open."""
    monkeypatch.setattr(setup, "LANE_TIMEOUT_SHARE", share)


def raise_again_after(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    """How long a lane that broke stays down."""
    monkeypatch.setattr(Upkeep, "pause_s", lambda _: pause_s)


def lane_pause(pause_s: float, *, autouse: bool = False) -> Any:
    """A fixture of tests in which a lane that broke stays down for so long."""

    @pytest.fixture(autouse=autouse)
    def pause(monkeypatch: pytest.MonkeyPatch) -> None:
        raise_again_after(monkeypatch, pause_s)

    return pause
