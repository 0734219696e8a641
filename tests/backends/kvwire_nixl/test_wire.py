"""What halves tell each other: read as it was said, and nothing else taken for it."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.errors import BackendUnavailable, MalformedFrame
from kvwire.limits import BOOTSTRAP_BYTES_MAX, DESCRIPTOR_BYTES_MAX, SPAN_PIECES_MAX
from kvwire.types import Role
from kvwire_nixl.wire import BYE, LaneProofs, NixlBootstrap, NixlPlace

OURS = LaneProofs(b"s" * 32, Role.CLIENT)
THEIRS = LaneProofs(b"s" * 32, Role.SERVER)
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
