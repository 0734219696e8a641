"""Runs the simulator on a core with one line changed.

The core, the wire format and the simulator are imported anew, and one module of them
from a changed source. What the rest of the process has imported stays as it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

_AGAIN = ("kvwire.proto", "kvwire.wire", "tests.sim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One bug.

    Attributes:
        name: What is wrong, in words.
        module: Where.
        before: The source as it is; it occurs once.
        after: The source as somebody could have written it.
        rules: What a seed that finds it fails with.
        seeds: It is found within so many seeds from 0.
    """

    name: str
    module: str
    before: str
    after: str
    rules: frozenset[str]
    seeds: int = 1000


@contextmanager
def planted(bug: Planted) -> Iterator[ModuleType]:
    """``tests.sim.run``, running a core that has the bug."""
    finder = _Finder(bug)
    before = _take_out()
    sys.meta_path.insert(0, finder)
    try:
        run = importlib.import_module("tests.sim.run")
        assert finder.used, f"{bug.module} is not imported by the simulator"
        yield run
    finally:
        sys.meta_path.remove(finder)
        _take_out()
        _put_back(before)


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.startswith(_AGAIN)]
    return {name: sys.modules.pop(name) for name in names}


def _put_back(modules: dict[str, ModuleType]) -> None:
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, module)


class _Finder(MetaPathFinder):
    def __init__(self, bug: Planted) -> None:
        self.used = False
        self._bug = bug

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != self._bug.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._bug)
        self.used = True
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, bug: Planted) -> None:
        super().__init__(name, path)
        self._bug = bug

    def get_code(self, fullname: str) -> CodeType:
        bug = self._bug
        source = self.get_data(self.path).decode()
        found = source.count(bug.before)
        assert found == 1, f"{bug.name}: its place occurs {found} times in {fullname}"
        code: Any = self.source_to_code(
            source.replace(bug.before, bug.after).encode(), self.path
        )
        assert isinstance(code, CodeType)
        return code
