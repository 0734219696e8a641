"""The ceilings of how far a public call walks, and of what stays alive."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from tests.programs.bench.walks import ALIVE, WALKS, alive, walk

# Calls, files and moves between files. What makes a walk shorter lowers its line; what
# makes one longer gives its reason in the commit.
CEILINGS: Final = {
    "send 100 B": (8, 7, 8),
    "send 4 MB": (21, 15, 19),
    "pull to OPEN on the link": (40, 24, 33),
    "mark to socket": (60, 23, 47),
    "ready to layer": (145, 33, 121),
    "connect": (544, 60, 391),
}
# Objects of kvwire's classes, and how many classes.
ALIVE_CEILINGS: Final = {
    "open transfer": (54, 29),
    "connection": (72, 35),
}


def test_everything_has_its_ceiling() -> None:
    assert list(CEILINGS) == list(WALKS)
    assert list(ALIVE_CEILINGS) == list(ALIVE)


@pytest.mark.parametrize("name", CEILINGS)
def test_a_walk_is_no_longer_than_it_was(name: str) -> None:
    found = asyncio.run(walk(name))
    assert len(found.steps) == found.calls > 0
    calls, files, moves = CEILINGS[name]
    listed = "\n".join(found.steps)
    assert found.calls <= calls, f"calls:\n{listed}"
    assert found.files <= files, f"files:\n{listed}"
    assert found.moves <= moves, f"moves:\n{listed}"


@pytest.mark.parametrize("name", ALIVE_CEILINGS)
def test_no_more_is_alive_than_was(name: str) -> None:
    found = asyncio.run(alive(name))
    assert sum(found.names.values()) == found.objects > 0
    objects, classes = ALIVE_CEILINGS[name]
    assert found.objects <= objects, found.names
    assert found.classes <= classes, found.names
