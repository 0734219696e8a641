"""Runs the simulator on a core with one bug planted, to show that it is found (Q6).

The bugs are in planted.txt, each as a name, the module with what the simulator says of
it, and the change as a diff. The core, the wire format and the simulator are imported
anew, and one module of them with the change. What the rest of the process has imported
stays as it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, Self

SEEDS: Final = 3000
"""Every bug is found within so many seeds from 0, most within 1000."""
_AGAIN = ("kvwire.proto", "kvwire.wire", "tests.sim", "tests.support.core_pair")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One bug: what is wrong, where, the source before and after, and how it is found.

    ``rules`` are what a seed that finds it may fail with.
    """

    name: str
    module: str
    before: str
    after: str
    rules: frozenset[str]

    @classmethod
    def read(cls, text: str) -> Self:
        """Read one entry of planted.txt."""
        name, found, *diff = text.splitlines()
        module, _, rules = found.partition(": ")
        return cls(
            name=name,
            module=f"kvwire.proto.{module}",
            before="".join(f"{line[1:]}\n" for line in diff if line[0] != "+"),
            after="".join(f"{line[1:]}\n" for line in diff if line[0] != "-"),
            rules=frozenset(rules.split()),
        )


_, *_entries = Path(__file__).with_suffix(".txt").read_text().split("\n\n")
BUGS: Final = tuple(map(Planted.read, _entries))


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
