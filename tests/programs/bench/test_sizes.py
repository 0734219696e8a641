"""``python -m tests.programs.bench sizes``, and that its work grows no faster than it.

Its figures are of a quiet machine. Here calls are counted, of Python and of C.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

import kvwire
from kvwire.cli.main import main
from kvwire.limits import KIB, MIB
from tests.programs.bench.__main__ import app
from tests.programs.bench.sizes import cache_of, filled

_SMALL = ("--tier-mib", "4", "--requests", "50", "--blocks", "100")


def test_all_figures_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes", *_SMALL], app) == 0
    printed = capsys.readouterr().out
    for text in ("of 4 MiB kept, in blocks of 16 KiB", "closed with them", "of a list"):
        assert text in printed


@pytest.mark.parametrize("block_bytes", [4 * KIB, 16 * KIB, 64 * KIB, MIB])
async def test_blocks_fill_a_tier(block_bytes: int) -> None:
    _, _, share, *_ = await filled(32 * MIB, block_bytes)
    assert share == 100


async def closing(count: int) -> int:
    """Return the calls of a close with so many published requests."""
    cache = cache_of(64, 4)
    calls = 0

    def seen(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    async with kvwire.open(name="closing") as here:
        held = [here.publish(f"request-{n}", cache, [n % 4]) for n in range(count)]
        sys.setprofile(seen)
        try:
            await here.close()
        finally:
            sys.setprofile(None)
    assert all(one.is_drained for one in held)
    return calls


async def test_a_close_takes_the_same_for_each_published_request() -> None:
    few, many = await closing(200), await closing(2000)
    assert many <= 11 * few
    assert many <= 2000 * 90
