"""The ceilings of how far a public call walks, and of what stays alive."""

from __future__ import annotations

import asyncio
import operator
from typing import Final

import pytest

from kvwire.memory import pieces
from tests.programs.bench.walks import ALIVE, WALKS, alive, walk

# Calls, files and moves between files. What makes a walk shorter lowers its line; what
# makes one longer gives its reason in the commit. With a compiled copy.
CEILINGS: Final = {
    "send 100 B": (8, 7, 8),
    "send 4 MB": (21, 15, 19),
    "pull to OPEN on the link": (38, 22, 31),
    "mark to socket": (29, 15, 21),
    "ready to layer": (88, 28, 71),
    "connect": (449, 54, 318),
}
# So many more of each copy the pieces of a layer where nothing is compiled.
_NOT_COMPILED: Final = (8, 1, 4)
# Objects of kvwire's classes, and how many classes.
ALIVE_CEILINGS: Final = {
    "open transfer": (54, 29),
    "connection": (78, 38),
}


def test_everything_has_its_ceiling() -> None:
    assert list(CEILINGS) == list(WALKS)
    assert list(ALIVE_CEILINGS) == list(ALIVE)


@pytest.mark.parametrize("name", CEILINGS)
def test_a_walk_is_no_longer_than_it_was(name: str) -> None:
    found = asyncio.run(walk(name))
    assert len(found.steps) == found.calls > 0
    more = (0, 0, 0) if pieces.compiled else _NOT_COMPILED
    calls, files, moves = map(operator.add, CEILINGS[name], more)
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
