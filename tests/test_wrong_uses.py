"""Whoever uses kvwire wrongly is told so at once, in words that help.

The rows are those of docs/reference/wrong-uses.md.
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

import kvwire
from tests.support.wrong_uses.rows import Row, do, rows
from tests.support.wrong_uses.steps import STEPS
from tests.support.wrong_uses.things import things

ROWS = rows()
# No row needs a second; one that hangs is not to end the whole run.
_PATIENCE_S = 10.0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.use[:40])
# Threads of a row have loops of their own.
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_wrong_use_is_told(row: Row, tmp_path: Path) -> None:
    async with things(tmp_path) as there, asyncio.timeout(_PATIENCE_S):
        try:
            said = do(row.use, there)
            if inspect.isawaitable(said):
                said = await said
            assert isinstance(said, kvwire.Outcome)
            assert not said.complete
            words = "; ".join(said.missing.reasons)
        except kvwire.KVWireError as exc:
            said, words = exc, str(exc)
    assert type(said).__name__ == row.error
    assert row.words in words


def test_the_rows_are_all_there_and_different() -> None:
    uses = [row.use for row in ROWS]
    assert len(uses) >= 120
    assert len(set(uses)) == len(uses)
    assert STEPS.keys() <= set(uses)
