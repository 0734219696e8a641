"""`import kvwire` is cheap, and every public name is there when it is used."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import kvwire
from tests.support.runs import python


def test_import_kvwire_loads_neither_numpy_nor_a_loop() -> None:
    """What only needs the version or an error does not wait for the rest."""
    code = "import sys, kvwire; print(*sys.modules, sep='\\n')"
    done = python("-c", code, check=True)
    loaded = set(done.stdout.split())
    assert "kvwire.errors" in loaded
    assert not loaded & {"numpy", "asyncio", "msgspec", "socket", "kvwire.communicator"}
    assert not loaded & {
        "torch",
        "cupy",
        "pytest",
        "rich",
        "cyclopts",
        "kvwire.testing",
    }
    assert not {module for module in loaded if module.startswith("kvwire_")}


@pytest.mark.parametrize("name", kvwire.__all__)
def test_a_public_name_is_what_its_home_defines(name: str) -> None:
    found = getattr(kvwire, name)
    if name != "__version__":
        assert found is getattr(importlib.import_module(found.__module__), name)


def test_type_checkers_and_the_table_agree() -> None:
    """The names come from where mypy thinks they come from."""
    source = Path(str(kvwire.__file__)).read_text()
    block = next(n for n in ast.parse(source).body if isinstance(n, ast.If))
    said = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert said == kvwire._HOMES
    assert said.keys() < set(kvwire.__all__)


def test_no_public_name_is_a_module() -> None:
    """Importing such a module would put it where the name belongs."""
    package = Path(str(kvwire.__file__)).parent
    assert not {p.stem for p in package.glob("*.py")} & set(kvwire.__all__)
    assert not {p.name for p in package.iterdir() if p.is_dir()} & set(kvwire.__all__)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'send'"):
        kvwire.send  # type: ignore[attr-defined]  # noqa: B018


def test_no_two_errors_have_one_code() -> None:
    """Or what a peer says would come out as either."""
    found: list[type[kvwire.KVWireError]]
    found = [kvwire.HandshakeError, kvwire.RequestError]
    for parent in found:
        found += parent.__subclasses__()
    codes = [cls.code for cls in found if "code" in vars(cls)]
    assert len(set(codes)) == len(codes) > 8
