"""The one place of Yama's scope 1; no kernel here has Yama, so prctl is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwire_local.tracer_slot import TracerSlot, tracers


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
    assert place.permit(100, "one")
    assert place.permit(100, "one")
    assert not place.permit(200, "one")
    assert prctl.calls == [100]
    place.withdraw(100, "one")
    assert not place.permit(200, "one")
    place.withdraw(100, "one")
    assert prctl.calls == [100, 0]
    assert place.permit(200, "one")
    assert prctl.calls == [100, 0, 200]


def test_none_and_pids_that_are_not_visible_get_nothing(scope: Path) -> None:
    prctl = Prctl()
    place = TracerSlot(prctl, scope)
    assert not place.permit(100, "none")
    assert not place.permit(0, "one")
    assert prctl.calls == []


@pytest.mark.parametrize("found", ["0\n", "2\n", "3\n", "what?\n"])
def test_under_other_scopes_nothing_is_named(scope: Path, found: str) -> None:
    scope.write_text(found)
    prctl = Prctl()
    assert not TracerSlot(prctl, scope).permit(100, "one")
    assert prctl.calls == []


def test_without_yama_nothing_is_named(tmp_path: Path) -> None:
    place = TracerSlot(Prctl(), tmp_path / "no such file")
    assert place.scope is None
    assert not place.permit(100, "one")


def test_a_refusal_leaves_the_place_free(scope: Path) -> None:
    assert not TracerSlot(Prctl(refuses=True), scope).permit(100, "one")
    place = TracerSlot(Prctl(), scope)
    assert place.permit(200, "one")


def test_the_system_call_can_be_made() -> None:
    """Without Yama the kernel refuses it; with Yama an empty place may be emptied."""
    place = tracers()
    assert place is tracers()
    assert place._name(0) is (place.scope is not None)
