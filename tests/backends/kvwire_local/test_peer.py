"""What is believed of a peer: nothing that was not checked."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvwire.errors import ConnectionLost, ProtocolError
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.memory.arena import Arena
from kvwire.memory.buffers import MID_PAGE_BYTES
from kvwire.memory.copy import address_of, as_fragments
from kvwire_certify.conformance.content import CUTS, Memory, pattern
from kvwire_certify.conformance.rig import open_descriptors
from kvwire_local.descriptor import DescribedPlace, PlaceKind
from kvwire_local.peer import MappedReading, MemoryReading, PeerMemory
from kvwire_local.shared_arenas import ARENA_BODY
from kvwire_local.tracer_slot import TracerSlot, tracers
from kvwire_local.wire import ARENAS_BYTES_MAX, PeerProcess

HERE = PeerProcess(os.getpid(), os.geteuid())
COOKIE = b"0123456789abcdef"


def ourselves() -> PeerMemory:
    return PeerMemory(HERE, address_of(COOKIE), COOKIE)


def pieces(*places: tuple[int, int]) -> Fragments:
    return Fragments(
        np.array([place for place, _ in places], np.uint64),
        np.array([nbytes for _, nbytes in places], np.uint64),
        owner=None,
        writable=False,
    )


# --- who it is ------------------------------------------------------------------------


def test_whose_cookie_is_read_is_the_peer() -> None:
    assert ourselves().refusal() == ""
    assert (
        PeerMemory(PeerProcess(0, 0), 4096, COOKIE).refusal()
        == "the peer is in another pid namespace"
    )
    assert "EFAULT" in PeerMemory(HERE, 4096, COOKIE).refusal()
    other = PeerMemory(HERE, address_of(COOKIE), COOKIE[::-1])
    assert other.refusal() == f"pid {os.getpid()} is another process here"


@pytest.mark.parametrize("cuts", [("view", "view"), ("odd-pages", "uneven")])
def test_memory_is_read_in_steps(cuts: tuple[str, str]) -> None:
    source, target = (Memory(3 * MIB, CUTS[cut]) for cut in cuts)
    source.fill(pattern(1, 3 * MIB))
    reading = MemoryReading(
        ourselves(), as_fragments(source.payload), as_fragments(target.payload)
    )
    steps = []
    while reading.rest:
        steps.append(reading.step(MIB))
    assert sum(steps) == 3 * MIB
    assert max(steps) <= MIB
    assert target.differs_at(pattern(1, 3 * MIB)) is None
    assert target.gaps_are_whole()


def test_another_process_under_the_pid_is_noticed() -> None:
    cookie = bytearray(COOKIE)
    peer = PeerMemory(HERE, address_of(cookie), COOKIE)
    source, target = Memory(100), Memory(100)
    reading = MemoryReading(
        peer, as_fragments(source.payload), as_fragments(target.payload)
    )
    cookie[3] ^= 1
    with pytest.raises(ConnectionLost, match="is no longer the peer"):
        reading.step(MIB)


def test_memory_that_is_not_there_is_lost() -> None:
    reading = MemoryReading(
        ourselves(), pieces((4096, 10)), as_fragments(memoryview(bytearray(10)))
    )
    with pytest.raises(ConnectionLost, match="EFAULT"):
        reading.step(MIB)


# --- its arenas -----------------------------------------------------------------------


def adopted(arena: Arena) -> PeerMemory:
    peer = ourselves()
    peer.adopt(ARENA_BODY.pack(0), os.dup(arena.fileno()))
    return peer


def test_an_arena_is_read_in_steps() -> None:
    arena = Arena(2 * MIB)
    arena.buffer(2 * MIB)[:] = pattern(5, 2 * MIB)
    peer = adopted(arena)
    target = Memory(MIB, CUTS["pages"])
    said = pieces((MID_PAGE_BYTES + MIB, 512 * 1024), (MID_PAGE_BYTES, 512 * 1024))
    reading = peer.reading(
        DescribedPlace(PlaceKind.ARENA, 0, said), as_fragments(target.payload)
    )
    assert isinstance(reading, MappedReading)
    assert reading.step(300_000) == 300_000
    assert reading.step(MIB) == MIB - 300_000
    assert reading.rest == 0
    whole = pattern(5, 2 * MIB)
    expected = np.concatenate((whole[MIB : MIB + MIB // 2], whole[: MIB // 2]))
    assert target.differs_at(expected) is None
    peer.close()
    arena.close()


def test_an_arena_that_is_taken_back_is_read_to_the_end() -> None:
    """Whatever the peer sends, memory that is being read stays mapped."""
    with Arena(8192) as arena:
        peer = adopted(arena)
        place = DescribedPlace(PlaceKind.ARENA, 0, pieces((MID_PAGE_BYTES, 8192)))
        target = as_fragments(memoryview(bytearray(8192)))
        reading = peer.reading(place, target)
        assert reading is not None
        reading.step(100)
        peer.forget(ARENA_BODY.pack(0))
        assert reading.step(MIB) == 8092
        with pytest.raises(ProtocolError, match="arena 0 is not shared"):
            peer.reading(place, target)
        for body in (ARENA_BODY.pack(0), ARENA_BODY.pack(1), b""):
            with pytest.raises(ProtocolError, match="is not shared"):
                peer.forget(body)
        with pytest.raises(ProtocolError, match="next arena must have number 1"):
            peer.adopt(ARENA_BODY.pack(0), os.dup(arena.fileno()))
        peer.adopt(ARENA_BODY.pack(1), os.dup(arena.fileno()))
        peer.close()


def test_a_peer_does_not_use_up_our_addresses() -> None:
    peer = ourselves()
    with Arena(ARENAS_BYTES_MAX // 2 + MIB) as arena:
        peer.adopt(ARENA_BODY.pack(0), os.dup(arena.fileno()))
        with pytest.raises(ProtocolError, match=f"more than {ARENAS_BYTES_MAX}"):
            peer.adopt(ARENA_BODY.pack(1), os.dup(arena.fileno()))
    peer.close()


def test_what_lies_beyond_an_arena_is_refused() -> None:
    with Arena(8192) as arena:
        peer = adopted(arena)
        target = as_fragments(memoryview(bytearray(200)))
        end = 8192 + mmap.PAGESIZE
        for said in (pieces((end - 99, 100)), pieces((0, 100), (end, 100))):
            with pytest.raises(ProtocolError, match=f"beyond the arena's {end} bytes"):
                peer.reading(DescribedPlace(PlaceKind.ARENA, 0, said), target)
        peer.close()


def test_an_arena_that_was_not_announced_is_waited_for() -> None:
    target = as_fragments(memoryview(bytearray(100)))
    place = DescribedPlace(PlaceKind.ARENA, 0, pieces((0, 100)))
    assert ourselves().reading(place, target) is None


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_a_descriptor_whose_pages_could_vanish_is_refused(seals: int) -> None:
    before = len(open_descriptors())
    file = os.memfd_create("no arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(ProtocolError, match="not a sealed arena"):
        ourselves().adopt(ARENA_BODY.pack(0), file)
    assert len(open_descriptors()) == before


def test_a_descriptor_that_is_no_memory_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not a sealed arena"):
        ourselves().adopt(ARENA_BODY.pack(0), os.open(os.devnull, os.O_RDONLY))


def test_arenas_are_numbered_in_order() -> None:
    with Arena(4096) as arena:
        for body in (ARENA_BODY.pack(1), b"", b"\0\0\0\0\0"):
            with pytest.raises(
                ProtocolError, match="the next arena must have number 0"
            ):
                ourselves().adopt(body, os.dup(arena.fileno()))


# --- the one place of Yama's scope 1; no kernel here has Yama, so prctl is recorded ---


class Prctl:
    """What was put into the place."""

    def __init__(self, refuses: bool = False) -> None:
        self.calls: list[int] = []
        self._refuses = refuses

    def __call__(self, pid: int) -> bool:
        self.calls.append(pid)
        return not self._refuses


@pytest.fixture
def scope(tmp_path: Path) -> Path:
    file = tmp_path / "ptrace_scope"
    file.write_text("1\n")
    return file


def test_one_peer_has_the_place_until_its_last_lane_ends(scope: Path) -> None:
    prctl = Prctl()
    place = TracerSlot(prctl, scope)
    assert place.permit(100)
    assert place.permit(100)
    assert not place.permit(200)
    assert prctl.calls == [100]
    place.withdraw(100)
    assert not place.permit(200)
    place.withdraw(100)
    assert prctl.calls == [100, 0]
    assert place.permit(200)
    assert prctl.calls == [100, 0, 200]


def test_pids_that_are_not_visible_get_nothing(scope: Path) -> None:
    prctl = Prctl()
    place = TracerSlot(prctl, scope)
    assert not place.permit(0)
    assert prctl.calls == []


@pytest.mark.parametrize("found", ["0\n", "2\n", "3\n", "what?\n"])
def test_under_other_scopes_nothing_is_named(scope: Path, found: str) -> None:
    scope.write_text(found)
    prctl = Prctl()
    assert not TracerSlot(prctl, scope).permit(100)
    assert prctl.calls == []


def test_without_yama_nothing_is_named(tmp_path: Path) -> None:
    place = TracerSlot(Prctl(), tmp_path / "no such file")
    assert place.scope is None
    assert not place.permit(100)


def test_a_refusal_leaves_the_place_free(scope: Path) -> None:
    assert not TracerSlot(Prctl(refuses=True), scope).permit(100)
    place = TracerSlot(Prctl(), scope)
    assert place.permit(200)


def test_the_system_call_can_be_made() -> None:
    """Without Yama the kernel refuses it; with Yama an empty place may be emptied."""
    place = tracers()
    assert place is tracers()
    assert place._name(0) is (place.scope is not None)
