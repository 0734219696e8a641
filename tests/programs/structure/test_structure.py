"""Each number of the structure is found in small examples."""

from __future__ import annotations

import pytest

from tests.programs.structure import idioms, imports, scaffolding
from tests.support.tree import Source

GRAPH = {
    "kvwire": {"kvwire.engine"},
    "kvwire.engine": {"kvwire.endpoint.a", "kvwire"},
    "kvwire.endpoint.a": {"kvwire.endpoint.b", "kvwire.types"},
    "kvwire.endpoint.b": {"kvwire.endpoint.c"},
    "kvwire.endpoint.c": {"kvwire.endpoint.a"},
    "kvwire.types": set(),
    "kvwire_tcp.link": {"kvwire.types", "kvwire_tcp.wire"},
    "kvwire_tcp.wire": set(),
}


def test_arrows_lead_from_room_to_room() -> None:
    assert imports.arrows(GRAPH) == {
        ("__init__", "engine"),
        ("engine", "__init__"),
        ("engine", "endpoint"),
        ("endpoint", "types"),
        ("backends", "types"),
    }


def test_a_ring_inside_a_room_is_found_and_the_list_of_public_names_is_in_none() -> (
    None
):
    assert imports.rings(GRAPH) == [
        ["kvwire.endpoint.a", "kvwire.endpoint.b", "kvwire.endpoint.c"]
    ]


def test_the_longest_chain_takes_a_ring_of_rooms_as_one_floor() -> None:
    assert imports.chain(GRAPH) == ["__init__ = engine", "endpoint", "types"]


@pytest.mark.parametrize(
    "body",
    [
        "def f(self, a, b=1):\n    return self._state.f(a, b)",
        "async def f(self, a):\n    '''Do it.'''\n    await self._state.f(a, x=None)",
        "def f(*args, **more):\n    return g(*args, **more)",
        "def f(self):\n    self._thread.start()",
    ],
)
def test_a_function_that_only_passes_on_is_a_forwarder(body: str) -> None:
    assert list(idioms.forwarders(Source("a.py", body)))


@pytest.mark.parametrize(
    "body",
    [
        "def f(self, a):\n    return self._state.f(a + 1)",
        "def f(self, a, b):\n    return self._state.f(a)",
        "def f(self, a):\n    check(a)\n    return g(a)",
        "def __iter__(self):\n    return iter(self._items)",
    ],
)
def test_a_function_that_does_something_is_no_forwarder(body: str) -> None:
    assert not list(idioms.forwarders(Source("a.py", body)))


def test_callbacks_and_backoffs_are_found() -> None:
    text = """
def f(done: Callable[[int], None] | None, *, other: int) -> Callable[[], None]:
    while True:
        try: f()
        except OSError: await asyncio.sleep(1.0)
    while True:
        try: f()
        except OSError: await asyncio.sleep(0)
    while True: await asyncio.sleep(1.0)
"""
    source = Source("a.py", text)
    assert list(idioms.callbacks(source)) == ["a.py:2: f: done"]
    assert list(idioms.backoffs(source)) == ["a.py:3"]


def test_lines_around_tests_and_helper_classes_are_counted_by_folder() -> None:
    text = """
class Rig:
    def test_me(self): ...

class TestRig:
    @parametrize
    def test_it(self):
        def test_within(): ...

class Life(RuleBasedStateMachine):
    @rule()
    def something_happens(self): ...
"""
    files = [Source("tests/wire/test_a.py", text), Source("tests/wire/b/c.py", "x\n")]
    (name,) = found = scaffolding.counted(files)
    assert name == "tests/wire"
    assert (found[name].lines, found[name].inside, found[name].tests) == (13, 7, 3)
    assert (found[name].around, found[name].classes) == (6, 1)
    assert scaffolding.above({"tests/wire": found[name]}) == []
    found[name].inside = 0
    assert scaffolding.above({"tests/new": found[name]})
