"""What a verb has reported is what is there, whatever fails meanwhile.

All of it: ``python -m tests.programs.verbs --acts 10000``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwire.store import placement
from kvwire.store.server.messages import Find
from kvwire.store.tiers import remote
from tests.programs.verbs.acts import ACTS, VERBS, Wrong, run

SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 23)]


@pytest.mark.parametrize("seed", [1, 2, *SLOW])
def test_what_was_reported_is_what_is_there(tmp_path: Path, seed: int) -> None:
    found = run(seed, tmp_path, ACTS)
    assert sum(found[verb] for verb in VERBS) == ACTS
    assert any(found[f"failures: {what}"] for what in ("cut", "disk", "down"))


def test_a_seed_always_gives_the_same_course(tmp_path: Path) -> None:
    one, other = (run(7, tmp_path / name, 12) for name in ("one", "other"))
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["memory counts", "one tier is enough"])
def test_planted_mistakes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """Blocks in a server's memory count as kept; an unpin is done where one is."""
    if mistake == "memory counts":
        monkeypatch.setattr(
            remote, "Find", lambda number, names, _: Find(number, names)
        )
    else:
        monkeypatch.setattr(placement, "_EACH", placement._ANY)
    with pytest.raises(Wrong, match="done, and not so"):
        _run_all(tmp_path)


def _run_all(folder: Path) -> None:
    for seed in range(1, 41):
        run(seed, folder / str(seed), ACTS)
