"""Rooms, arrows, floors and rings, from a graph of imports."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Final

ROOT: Final = "kvwire"
BACKENDS: Final = "backends"

# Who imports whom, by the full names of modules.
Graph = Mapping[str, Collection[str]]


def of_tree(others: Iterable[str]) -> Graph:
    """What the files of kvwire and of other packages import, for annotations too."""
    # It comes with import-linter, which only `make check` has.
    import grimp

    graph = grimp.build_graph(
        ROOT, *others, exclude_type_checking_imports=False, cache_dir=None
    )
    return {
        module: graph.find_modules_directly_imported_by(module)
        for module in graph.modules
    }


def room(module: str) -> str:
    """The room that a module is in."""
    package, *inside = module.split(".")
    if package != ROOT:
        return BACKENDS
    return inside[0] if inside else "__init__"


def arrows(graph: Graph) -> set[tuple[str, str]]:
    """Which room imports which other."""
    ends = ((room(module), room(other)) for module in graph for other in graph[module])
    return {(one, other) for one, other in ends if one != other}


def rings(graph: Graph) -> list[list[str]]:
    """Modules that reach each other, the largest ring first."""
    inner = {
        module: [other for other in graph[module] if other != ROOT]
        for module in graph
        if module != ROOT
    }
    return [ring for ring in _knots(inner) if len(ring) > 1]


def chain(graph: Graph) -> list[str]:
    """The longest way down from room to room; rooms in a ring are one floor."""
    below: dict[str, set[str]] = {room(module): set() for module in graph}
    for one, other in arrows(graph):
        below[one].add(other)
    floor_of = {one: " = ".join(knot) for knot in _knots(below) for one in knot}

    @functools.cache
    def longest(floor: str) -> list[str]:
        under = {
            floor_of[other]
            for one in floor.split(" = ")
            for other in below[one]
            if floor_of[other] != floor
        }
        return [floor, *max(map(longest, sorted(under)), key=len, default=[])]

    return max(map(longest, sorted(set(floor_of.values()))), key=len)


def _knots(graph: Graph) -> list[list[str]]:
    """The strongly connected components of a graph, the largest first."""
    reached = {node: _reached(graph, node) for node in graph}
    knots = {
        tuple(sorted({node, *(n for n in reached[node] if node in reached[n])}))
        for node in graph
    }
    return [list(knot) for knot in sorted(knots, key=lambda knot: (-len(knot), knot))]


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        new = set(graph[pending.pop()]) - found
        found |= new
        pending.extend(new)
    return found
