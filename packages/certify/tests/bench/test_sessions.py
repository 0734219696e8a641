"""``python -m packages.certify.tests.bench sessions``, in a small round."""

from __future__ import annotations

import pytest

from packages.certify.tests.bench import sessions


async def test_a_small_round_measures_each_figure() -> None:
    """It asserts by itself what is restored, and that both servers answer the same."""
    for name in ("xllamacpp", "gguf"):
        why = f"{name}: not installed here; `make test-llamacpp` installs it"
        pytest.importorskip(name, reason=why)
    found = await sessions.measure(tokens=320, rounds=1, requests=1)
    assert all(figure > 0 for figure in found.values()), found
    assert found["stores"] == 5 / 10, "160 of 320 tokens, in blocks of 32"
    assert "first token of a session: computed in " in sessions.shown(found)
