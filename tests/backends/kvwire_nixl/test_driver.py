"""The driver of a lane, whose peer has just ended or may be about to connect."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from kvwire.errors import BackendUnavailable, ConnectionLost, MalformedFrame
from kvwire.limits import BOOTSTRAP_BYTES_MAX, DESCRIPTOR_BYTES_MAX, SPAN_PIECES_MAX
from kvwire.types import Role
from kvwire_nixl import driver as driver_module
from kvwire_nixl.driver import NixlDriver
from kvwire_nixl.library import NixlAgent
from kvwire_nixl.settings import parse
from kvwire_nixl.wire import BYE, LaneProofs, NixlBootstrap, NixlPlace

OURS = LaneProofs(b"s" * 32, Role.CLIENT)
THEIRS = LaneProofs(b"s" * 32, Role.SERVER)


class AgentOfAPeerGone:
    """An agent whose reads fail; what the peer said last comes with the second look."""

    def __init__(self, last: list[bytes]) -> None:
        self._notes = [[], last]

    def notes(self) -> list[bytes]:
        return self._notes.pop(0) if self._notes else []

    def is_done(self, _: int) -> bool:
        raise ConnectionLost("nixl: getXferStatus: NIXL_ERR_REMOTE_DISCONNECT")


def driver_of(agent: object, sent: list[int]) -> NixlDriver:
    """A driver whose thread has not begun."""
    driver = NixlDriver(
        parse({}),
        NixlBootstrap("1.5.1", "UCX", "a" * 32, 0, b""),
        OURS,
        "test",
        call_soon=lambda call: call(),
        joined=lambda _: None,
        received=lambda _: None,
        sent=sent.append,
        gone=lambda _: None,
    )
    driver.agent = cast("NixlAgent", agent)
    return driver


@pytest.mark.parametrize(
    ("last", "told"), [([THEIRS.note(1), THEIRS.note(BYE)], [1]), ([], [])]
)
def test_a_peer_may_end_once_it_has_read_everything(
    last: list[bytes], told: list[int]
) -> None:
    """Its word is being read meanwhile, to see that it lives."""
    sent: list[int] = []
    driver = driver_of(AgentOfAPeerGone(last), sent)
    driver._offered, driver._word_handle, driver._word_posted = 1, 7, True
    if told:
        assert driver._turn()
    else:
        with pytest.raises(ConnectionLost, match="DISCONNECT"):
            driver._turn()
    assert sent == told


class AgentThatIsLookedFor:
    """An agent whose peer connects between two looks, or never does."""

    def __init__(self, *, connects: bool) -> None:
        self._connects = connects
        self.looks = 0
        self.closed_after: int | None = None

    def notes(self) -> list[bytes]:
        self.looks += 1
        return [THEIRS.note(0)] if self._connects and self.looks == 3 else []

    def close(self) -> None:
        self.closed_after = self.looks


@pytest.mark.parametrize("connects", [True, False])
def test_an_agent_stays_for_a_peer_that_may_be_connecting(
    connects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX would end the process of the peer; nor does it stay for ever."""
    if not connects:
        monkeypatch.setattr(driver_module, "_LINGER_S", 0.01)
    agent = AgentThatIsLookedFor(connects=connects)
    driver = driver_of(agent, [])
    driver._made = True
    driver._quiesce()
    assert agent.closed_after is not None
    assert agent.closed_after == 3 or not connects


def test_an_agent_that_nobody_knows_is_closed_at_once() -> None:
    """A client's is told with its first payload."""
    agent = AgentThatIsLookedFor(connects=True)
    driver = driver_of(agent, [])
    driver._made = True
    driver.meet(NixlBootstrap("1.5.1", "UCX", "b" * 32, 1, b"the way there"))
    driver._quiesce()
    assert agent.closed_after == 0


# --- what halves tell each other: read as it was said, and nothing else taken for it


STRANGER = LaneProofs(b"t" * 32, Role.SERVER)
BOOTSTRAP = NixlBootstrap("1.5.1", "UCX", "a" * 32, 4096, b"metadata")


def place(lengths: list[int], news: tuple[bytes, ...] = ()) -> NixlPlace:
    sizes = np.array(lengths, np.uint64)
    return NixlPlace(
        np.arange(sizes.size, dtype=np.uint64) * np.uint64(1 << 40), sizes, 7, news
    )


@pytest.mark.parametrize(
    ("raw", "nbytes", "why"),
    [
        (b"", 0, "descriptor of 0 bytes"),
        (bytes(DESCRIPTOR_BYTES_MAX + 1), 0, "descriptor of"),
        (OURS.place(place([8])) + b"\0", 8, "prove"),
        (STRANGER.place(place([8])), 8, "prove"),
        (THEIRS.place(place([8])), 8, "prove"),  # our own, thrown back
        (OURS.place(place([8])), 9, "9 bytes of the payload"),
        (OURS.place(place([2**64 - 8, 16])), 8, "8 bytes of the payload"),
        (OURS.place(place([8, 0])), 8, "8 bytes of the payload"),
        (OURS.place(place([1] * (SPAN_PIECES_MAX + 1))), SPAN_PIECES_MAX + 1, "pieces"),
    ],
)
def test_places_that_no_lane_would_make(raw: bytes, nbytes: int, why: str) -> None:
    with pytest.raises(MalformedFrame, match=why):
        THEIRS.read_place(raw, nbytes)


def test_a_place_that_does_not_fit_is_not_said() -> None:
    assert OURS.place(place([1], (bytes(DESCRIPTOR_BYTES_MAX),))) == b""


def test_the_newest_note_counts_and_a_strangers_does_not() -> None:
    notes = [THEIRS.note(3), THEIRS.note(7), STRANGER.note(9), OURS.note(8), b""]
    assert OURS.read_notes(notes) == (7, False)
    assert OURS.read_notes([]) == (0, False)
    assert OURS.read_notes([*notes, THEIRS.note(BYE)]) == (7, True)


def test_words_are_each_sides_own() -> None:
    assert OURS.word() == THEIRS.word(of_peer=True) != THEIRS.word()
    assert OURS.word(of_peer=True) != STRANGER.word()


def test_names_are_text_and_metadata_has_a_limit() -> None:
    raw = bytearray(BOOTSTRAP.encode())
    raw[raw.index(b"UCX")] = 0xFF
    with pytest.raises(BackendUnavailable, match="not text"):
        NixlBootstrap.decode(bytes(raw))
    many = NixlBootstrap("1.5.1", "UCX", "a", 0, bytes(BOOTSTRAP_BYTES_MAX))
    with pytest.raises(BackendUnavailable, match="name fewer"):
        many.encode()


@pytest.mark.parametrize(
    ("version", "plugin", "fits"),
    [("1.5.7", "UCX", True), ("1.4.1", "UCX", False), ("1.5.1", "LIBFABRIC", False)],
)
def test_both_sides_need_the_same(version: str, plugin: str, fits: bool) -> None:
    other = NixlBootstrap(version, plugin, "b", 0, b"")
    if fits:
        other.require_same(BOOTSTRAP)
        return
    with pytest.raises(BackendUnavailable, match=f"NIXL {version} with {plugin}"):
        other.require_same(BOOTSTRAP)
