"""The agent on a store: the tokens of one without, and few computed again.

Needs torch and transformers, which `make test` does not bring; `make test-torch` does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_WHY = "not installed here; `make test-torch` installs torch and transformers"
pytest.importorskip("torch", reason=f"torch: {_WHY}")
pytest.importorskip("transformers", reason=f"transformers: {_WHY}")

import agent_loop  # noqa: E402 - after the skip


async def conversation(folder: Path, *, stored: bool) -> Any:
    """What comes out of two turns, and two more behind a restart of the store."""
    for turns in (range(2), range(2, 4)):
        await agent_loop.child(folder, turns, 40, stored)
    return json.loads((folder / ("with" if stored else "without")).read_text())


async def test_what_was_computed_once_is_not_computed_again(tmp_path: Path) -> None:
    plain = await conversation(tmp_path, stored=False)
    kept = await conversation(tmp_path, stored=True)
    assert kept["tokens"] == plain["tokens"]
    assert len(kept["tokens"]) == 4 * 56
    assert [row["computed"] for row in plain["rows"]] == [40, 96, 152, 208]
    # All but the blocks of 16 that earlier turns have filled.
    assert [row["computed"] for row in kept["rows"]] == [40, 48, 56, 48]
