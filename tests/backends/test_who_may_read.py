"""Who gets a name for memory, tried row by row of the list in docs/topics/security.md.

Each row is tried with a process of this user and of a second one, and with each value
of ``one_sided_windows``, of which "off" is what a server with tenants sets.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kvwire.backend import Landing
from kvwire.backend.lane import LaneContext
from kvwire.errors import BackendUnavailable
from kvwire.limits import MIB
from kvwire.memory.arena import Arena
from kvwire.types import Device, MemoryKind, OneSidedWindows, Role
from kvwire_local.descriptor import PlaceKind, decode
from kvwire_local.tracer_slot import TracerSlot
from kvwire_local.wire import PeerProcess
from kvwire_nixl.settings import parse as nixl_settings
from kvwire_ucx.backend import UcxBackend
from kvwire_ucx.settings import DEFAULTS_OF_ENDING_KEYS
from tests.backends.kvwire_local.halves import Halves, halves
from tests.backends.kvwire_local.window_rig import OwnersCache
from tests.backends.window_pairs import Pool, pair
from tests.support.inside import mapped
from tests.support.tree import ROOT

PAGE = ROOT / "docs" / "topics" / "security.md"


class Peer(NamedTuple):
    """The user of a peer on this host, and how this side is configured."""

    windows: OneSidedWindows
    uid: int


OWN, OTHER = os.geteuid(), 4321
PEERS = [
    Peer("user", OWN),
    Peer("user", OTHER),
    Peer("peers", OTHER),
    Peer("off", OWN),
]
IN_PLACE = (True, False, True, False)
Check = Callable[[Peer, pytest.MonkeyPatch, Path], Awaitable[bool]]
ROWS: list[str] = []


def expect_row(
    name: str, expected: tuple[bool, ...]
) -> Callable[[Check], Callable[..., Awaitable[None]]]:
    """Make a test of what a row of the page names: whether each of PEERS gets it."""
    ROWS.append(name)

    def made(check: Check) -> Callable[..., Awaitable[None]]:
        @pytest.mark.parametrize(
            ("peer", "gets"),
            list(zip(PEERS, expected, strict=True)),
            ids=["user", "other", "peers", "off"],
        )
        async def test(
            peer: Peer, gets: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
        ) -> None:
            who = PeerProcess(os.getpid(), peer.uid)
            monkeypatch.setattr("kvwire_local.rendezvous.peer_process", lambda _: who)
            assert await check(peer, monkeypatch, tmp_path) == gets

        test.__name__ = check.__name__
        return test

    return made


async def moved(both: Halves, memory: npt.NDArray[np.uint8]) -> PlaceKind:
    """Send memory to the client; return where the client has read it."""
    target = np.zeros_like(memory)
    descriptor = both.server.send(memory.data, "token")
    both.client.receive(descriptor, Landing(memory.size, target.data))
    both.client.flush()
    await both.at_client.moved(received=1)
    assert np.array_equal(target, memory)
    return decode(descriptor, memory.size).kind


@expect_row("arenas with payload", IN_PLACE)
async def test_arenas_with_payload(peer: Peer, *_: object) -> bool:
    before = mapped("kvwire-secret")
    with Arena(2 * MIB, name="kvwire-secret") as arena:
        memory = arena.buffer(MIB)
        async with halves("arena", peer.windows) as both:
            await moved(both, memory)
            got = mapped("kvwire-secret") > before
        del memory
    return got


@expect_row("arenas with a window", IN_PLACE)
async def test_arenas_with_a_window(peer: Peer, *_: object) -> bool:
    before = mapped("kvwire-generations")
    with closing(OwnersCache(2, 4, 4096, in_arena=True)) as owner:
        async with halves("arena", peer.windows) as both:
            try:
                description = both.server.expose(owner.memory)
                await both.client.window(description, owner.memory).ready()
            except BackendUnavailable:
                return mapped("kvwire-generations") > before
    return True


@expect_row("addresses of payload", IN_PLACE)
async def test_addresses(peer: Peer, *_: object) -> bool:
    async with halves("auto", peer.windows) as both:
        return await moved(both, np.full(MIB, 5, np.uint8)) is PlaceKind.MEMORY


@expect_row("permission to trace the process", IN_PLACE)
async def test_permission(peer: Peer, patch: pytest.MonkeyPatch, folder: Path) -> bool:
    (folder / "scope").write_text("1")
    named: list[int] = []

    def name(pid: int) -> bool:
        named.append(pid)
        return True

    slot = TracerSlot(name, folder / "scope")
    patch.setattr("kvwire_local.lane.tracers", lambda: slot)
    async with halves("auto", peer.windows, tracer="none"):
        assert not named
    async with halves("auto", peer.windows):
        return os.getpid() in named


@expect_row("handles of device memory", IN_PLACE)
async def test_device_handles(
    peer: Peer, patch: pytest.MonkeyPatch, *_: object
) -> bool:
    patch.setattr("kvwire_local.windows.shared_allocations", lambda _: b"handles")
    with closing(OwnersCache(2, 4, 4096, in_arena=True)) as owner:
        async with halves("auto", peer.windows) as both:
            try:
                both.server.expose(
                    replace(owner.memory, device=Device(MemoryKind.CUDA, 0))
                )
            except BackendUnavailable:
                return False
    return True


@expect_row("the ring of a lane", (True,) * 4)
async def test_ring(peer: Peer, *_: object) -> bool:
    before = mapped("kvwire-staging")
    async with halves("arena", peer.windows) as both:
        await moved(both, np.full(MIB, 5, np.uint8))
        return mapped("kvwire-staging") > before


@expect_row("keys of a window", (False, False, True, False))
async def test_window_keys(peer: Peer, *_: object) -> bool:
    async with pair("ucx", {}, peer.windows) as (owner, _reader):
        try:
            return bool(owner.expose(Pool(4).memory))
        except BackendUnavailable:
            return False


@expect_row("keys of payload", (True, True, False, False))
async def test_lasting_keys(peer: Peer, *_: object) -> bool:
    """Whether UCX may keep the keys of payload that was sent."""
    backend = UcxBackend()
    lane = LaneContext(
        role=Role.CLIENT, number=1, secret=bytes(32), windows=peer.windows
    )
    try:
        settings = backend._context(lane).settings.ucx
        return not DEFAULTS_OF_ENDING_KEYS.items() <= settings.items()
    finally:
        await backend.aclose()


@expect_row("descriptions of arrays", (True, True, True, False))
async def test_arrays(peer: Peer, *_: object) -> bool:
    return nixl_settings({}, peer.windows).exposes_caches


# Rows in which neither users nor the setting count, and the tests that try them.
ELSEWHERE = {
    "identifiers of communicators": "kvwire_nccl/test_lane",
    "grants": "proto/test_regions",
    "tickets": "windows/test_windows",
    "windows of a store": "store/tests/test_tenants",
}


def test_each_row_of_the_page_is_tried() -> None:
    section = PAGE.read_text().split("### What leaves a process\n")[1].split("\n###")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0][2:] for line in lines[1:]] == [*ROWS, *ELSEWHERE]
