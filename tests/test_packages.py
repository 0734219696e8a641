"""What stands on kvwire in packages/: one version, one layout, one contract."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

import kvwire
from tests.support.tree import ROOT, packages, project, projects

every_package = pytest.mark.parametrize("folder", projects())


def _name(folder: str) -> str:
    return folder.removeprefix("packages/")


@every_package
def test_it_has_the_version_of_kvwire_and_asks_for_that(folder: str) -> None:
    said = project(folder)
    assert said["tool"]["hatch"]["version"] == {"path": "../../kvwire/__init__.py"}
    wanted = f"=={kvwire.__version__}"
    others = {f"kvwire-{_name(other)}{wanted}" for other in projects()}
    ours = [need for need in said["project"]["dependencies"] if "kvwire" in need]
    assert f"kvwire{wanted}" in ours
    assert set(ours) <= {f"kvwire{wanted}", *others}


@every_package
def test_it_is_laid_out_as_the_others(folder: str) -> None:
    """kvwire-name has the package kvwire_name, its tests and a page of one screen."""
    name = _name(folder)
    assert project(folder)["project"]["name"] == f"kvwire-{name}"
    assert list(packages(folder)) == [f"{folder}/kvwire_{name}"]
    assert sorted((ROOT / folder / "tests").glob("test_*.py"))
    assert (ROOT / folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    readme = (ROOT / folder / "README.md").read_text()
    assert readme.startswith(f"# kvwire-{name}\n")
    assert len(readme.splitlines()) <= 50
    assert "](" not in readme, "an index has no other file of the tree"


@every_package
def test_what_it_offers_is_installed_and_resolves(folder: str) -> None:
    said = project(folder)["project"]
    declared = {("console_scripts", name) for name in said.get("scripts", {})}
    for group, points in said.get("entry-points", {}).items():
        declared |= {(group, name) for name in points}
    found = metadata.distribution(said["name"]).entry_points
    assert {(point.group, point.name) for point in found} == declared, (
        "run `make test`: the install is out of date"
    )
    for point in found:
        assert point.load() is not None, point


@every_package
def test_it_keeps_the_contract_of_packages(folder: str) -> None:
    """import-linter knows no pattern of names, so its settings list each package."""
    package = f"kvwire_{_name(folder)}"
    linter: dict[str, Any] = project()["tool"]["importlinter"]
    contracts = {one["name"]: one for one in linter["contracts"]}
    sees = contracts["A package sees public names of kvwire, and what plug-ins see"]
    named = contracts["Neither kvwire nor a backend names a package"]
    assert package in linter["root_packages"]
    assert package in sees["source_modules"]
    assert package in named["forbidden_modules"]
