"""Whoever uses kvwire wrongly is told so at once, in words that help.

The rows stand in tests/support/wrong_uses; docs/reference/wrong-uses.md is written from
them.
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

import kvwire
from tests.support.wrong_uses import SECTIONS, WrongUse, things

ROWS = [row for rows in SECTIONS.values() for row in rows]
# No row needs a second; one that hangs is not to end the whole run.
_PATIENCE_S = 10.0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name[:40])
# Threads of a row have loops of their own.
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_wrong_use_is_told(row: WrongUse, tmp_path: Path) -> None:
    async with things(tmp_path) as there, asyncio.timeout(_PATIENCE_S):
        if row.error is kvwire.Outcome:
            outcome: kvwire.Outcome = await row.do(there)
            assert not outcome.complete
            assert row.words in "; ".join(outcome.missing.reasons)
            return
        with pytest.raises(kvwire.KVWireError) as caught:
            await _done(row.do(there))
        assert type(caught.value) is row.error or (
            row.error is kvwire.ConnectionClosed
            and isinstance(caught.value, kvwire.ConnectionClosed)
        )
        assert row.words in str(caught.value)


async def _done(result: Any) -> None:
    if inspect.isawaitable(result):
        await result


def test_the_table_is_long_and_its_rows_are_different() -> None:
    assert len(ROWS) >= 120
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.words for row in ROWS)
