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


async def moved(both: Halves, memory: npt.NDArray[np.uint8]) -> PlaceKind:
    """Send memory to the client; return where the client has read it."""
    target = np.zeros_like(memory)
    descriptor = both.server.send(memory.data, "token")
    both.client.receive(descriptor, Landing(memory.size, target.data))
    both.client.flush()
    await both.at_client.moved(received=1)
    assert np.array_equal(target, memory)
    return decode(descriptor, memory.size).kind


async def arenas_with_payload(peer: Peer, *_: object) -> bool:
    with Arena(2 * MIB, name="kvwire-secret") as arena:
        memory = arena.buffer(MIB)
        async with halves("arena", peer.windows) as both:
            await moved(both, memory)
            got = mapped("kvwire-secret")
        del memory
    return got


async def arenas_with_a_window(peer: Peer, *_: object) -> bool:
    with closing(OwnersCache(2, 4, 4096, in_arena=True)) as owner:
        async with halves("arena", peer.windows) as both:
            try:
                description = both.server.expose(owner.memory)
                await both.client.window(description, owner.memory).ready()
            except BackendUnavailable:
                return mapped("kvwire-generations")
    return True


async def addresses(peer: Peer, *_: object) -> bool:
    async with halves("auto", peer.windows) as both:
        return await moved(both, np.full(MIB, 5, np.uint8)) is PlaceKind.MEMORY


async def permission(peer: Peer, patch: pytest.MonkeyPatch, folder: Path) -> bool:
    (folder / "scope").write_text("1")
    named: list[int] = []

    def name(pid: int) -> bool:
        named.append(pid)
        return True

    slot = TracerSlot(name, folder / "scope")
    patch.setattr("kvwire_local.lane.tracers", lambda: slot)
    async with halves("auto", peer.windows):
        return os.getpid() in named


async def device_handles(peer: Peer, patch: pytest.MonkeyPatch, _: Path) -> bool:
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


async def ring(peer: Peer, *_: object) -> bool:
    async with halves("arena", peer.windows) as both:
        await moved(both, np.full(MIB, 5, np.uint8))
        return mapped("kvwire-staging")


async def window_keys(peer: Peer, *_: object) -> bool:
    async with pair("ucx", {}, peer.windows) as (owner, _reader):
        try:
            return bool(owner.expose(Pool(4).memory))
        except BackendUnavailable:
            return False


async def lasting_keys(peer: Peer, *_: object) -> bool:
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


async def arrays(peer: Peer, *_: object) -> bool:
    return nixl_settings({}, peer.windows).exposes_caches


# For each row, whether each of PEERS gets it.
ROWS: dict[str, tuple[Check, tuple[bool, ...]]] = {
    "arenas with payload": (arenas_with_payload, IN_PLACE),
    "arenas with a window": (arenas_with_a_window, IN_PLACE),
    "addresses of payload": (addresses, IN_PLACE),
    "permission to trace the process": (permission, IN_PLACE),
    "handles of device memory": (device_handles, IN_PLACE),
    "the ring of a lane": (ring, (True,) * 4),
    "keys of a window": (window_keys, (False, False, True, False)),
    "keys of payload": (lasting_keys, (True, True, False, False)),
    "descriptions of arrays": (arrays, (True, True, True, False)),
}
# Rows in which neither users nor the setting count, and the tests that try them.
ELSEWHERE = {
    "identifiers of communicators": "kvwire_nccl/test_lane",
    "grants": "fault/test_tenants",
    "tickets": "endpoint/test_windows",
    "windows of a store": "test_server_tenants",
}


def test_each_row_of_the_page_is_tried() -> None:
    section = PAGE.read_text().split("### What leaves a process\n")[1].split("\n###")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0][2:] for line in lines[1:]] == [*ROWS, *ELSEWHERE]


@pytest.mark.parametrize(
    "number", range(len(PEERS)), ids=["user", "other", "peers", "off"]
)
@pytest.mark.parametrize("row", ROWS)
async def test_a_peer_gets_what_it_may_read(
    row: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    who = PeerProcess(os.getpid(), PEERS[number].uid)
    monkeypatch.setattr("kvwire_local.rendezvous.peer_process", lambda _: who)
    check, expected = ROWS[row]
    assert await check(PEERS[number], monkeypatch, tmp_path) == expected[number]
