"""The files that make up kvwire, as text and as syntax trees, read once.

The packages are looked up beside these tests first and among the installed ones second,
so that the same rules are checked on a source tree and on an installed wheel.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Text that people read or machines run; pictures and golden bytes are neither.
_TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".txt", ".svg"}
_TEXT_NAMES = {"Makefile", "run", ".gitignore"}
_BUILD_DIRS = {"dist", "build", "mutants"}


@dataclass(frozen=True, slots=True)
class Source:
    """One file: where the tree has it (``kvwire/wire/header.py``), and its text."""

    path: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines, without their ends."""
        return self.text.splitlines()

    @property
    def syntax(self) -> ast.Module:
        """The syntax tree of a Python file."""
        return _parsed(self.text, self.path)


@functools.cache
def _parsed(text: str, path: str) -> ast.Module:
    return ast.parse(text, filename=path)


@functools.cache
def project(folder: str = "") -> dict[str, Any]:
    """What the pyproject.toml of kvwire says, or that of a folder of packages/."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


@functools.cache
def projects() -> tuple[str, ...]:
    """The folders of what stands on kvwire, such as packages/certify."""
    found = sorted((ROOT / "packages").glob("*/pyproject.toml"))
    return tuple(path.parent.relative_to(ROOT).as_posix() for path in found)


def packages(*folders: str) -> dict[str, Path]:
    """The folder of each package that wheels carry, by its path in the source tree.

    Args:
        folders: Those of the distributions; "" is kvwire's. All of them by default.
    """
    found = {}
    for folder in folders or ("", *projects()):
        wheel = project(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]
        for name in wheel["packages"]:
            path = f"{folder}/{name}".removeprefix("/")
            found[path] = _package_folder(path)
    return found


def _package_folder(name: str) -> Path:
    folder = ROOT / name
    if folder.is_dir():
        return folder
    spec = importlib.util.find_spec(folder.name)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{name} is neither in {ROOT} nor installed")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def sources(*prefixes: str) -> tuple[Source, ...]:
    """Every text file whose path in the tree starts with one of the prefixes."""
    return tuple(s for s in _everything() if s.path.startswith(prefixes))


def python(*prefixes: str) -> tuple[Source, ...]:
    """The Python files among :func:`sources`."""
    return tuple(s for s in sources(*prefixes) if s.path.endswith(".py"))


@functools.cache
def _everything() -> tuple[Source, ...]:
    found = dict(_files_below(ROOT, ""))
    for name, folder in packages().items():
        found.update(_files_below(folder, f"{name}/"))
    return tuple(Source(path, found[path].read_text()) for path in sorted(found))


def _files_below(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for where, dirs, files in os.walk(folder):
        dirs[:] = [name for name in dirs if not _is_derived(name)]
        for name in files:
            path = Path(where, name)
            if path.suffix in _TEXT_SUFFIXES or name in _TEXT_NAMES:
                yield prefix + path.relative_to(folder).as_posix(), path


def _is_derived(name: str) -> bool:
    """Whether a folder is made by a tool rather than written by a person."""
    hidden = name.startswith(".") and name != ".ci"
    return hidden or name in _BUILD_DIRS | {"__pycache__"} or name.endswith(".egg-info")


def folders() -> set[str]:
    """The top-level folders of the tree."""
    return {p.name for p in ROOT.iterdir() if p.is_dir() and not _is_derived(p.name)}


# Prefixes of the paths of what is shipped, and of all that tests it.
CODE = ("kvwire/", "backends/", *(f"{name}/" for name in packages(*projects())))
TESTS = ("tests/", *(f"{folder}/tests/" for folder in projects()))
