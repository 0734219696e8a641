"""What pip installs: metadata, entry points, type markers, and which copy it is."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvwire
from kvwire.backend.link import API_VERSION
from kvwire.proto import handshake
from kvwire_store.server import messages
from kvwire_store.tiers import disk_index
from kvwire_vllm import release as release_of_vllm
from tests.support.runs import python, ran
from tests.support.tree import ROOT, packages, project, projects, sources

DISTRIBUTION = metadata.distribution("kvwire")
_SOURCE_TREE = (ROOT / "kvwire").is_dir()
_locked = ROOT / ".ci" / "locked.txt"


def test_the_tested_copy_is_the_one_meant() -> None:
    """A source tree tests itself; without one, the installed wheel is tested."""
    where = Path(kvwire.__file__).resolve()
    site_packages = Path(sysconfig.get_path("purelib")).resolve()
    assert where.is_relative_to(ROOT if _SOURCE_TREE else site_packages)
    assert where.is_relative_to(site_packages) is not _SOURCE_TREE


def test_one_version_everywhere() -> None:
    """The module decides; the metadata and the changelog follow."""
    version = kvwire.__version__
    assert "version" in project()["project"]["dynamic"]
    assert DISTRIBUTION.version == version
    (changelog,) = sources("CHANGELOG.md")
    newest = re.search(r"^## \[([^\]]+)\]", changelog.text, re.MULTILINE)
    assert newest
    assert newest[1] == version


def test_the_table_of_versions_has_this_release() -> None:
    """An operator reads there which releases work together."""
    (page,) = sources("docs/howto/deployment.md")
    release = re.escape(kvwire.__version__.rpartition(".")[0])
    rows = re.findall(rf"^\| {release} \| (.+) \|$", page.text, re.MULTILINE)
    assert len(rows) == 1, f"no single row {release} in {page.path}"
    ranges = [
        " to ".join(dict.fromkeys(map(str, versions)))
        for versions in (
            handshake.VERSIONS,
            messages.VERSIONS,
            (API_VERSION,),
            (disk_index.FORMAT,),
        )
    ]
    assert rows[0].split(" | ")[:4] == ranges
    classifiers = DISTRIBUTION.metadata.get_all("Classifier") or []
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    engines = (
        ".".join(map(str, one))
        for one in (release_of_vllm.OLDEST, release_of_vllm.NEWEST)
    )
    assert rows[0].split(" | ")[4:] == [
        f"{pythons[0]} to {pythons[-1]}",
        " to ".join(engines),
    ]


@pytest.mark.parametrize("name", packages())
def test_every_package_is_marked_as_typed(name: str) -> None:
    """Without py.typed, type checkers ignore every annotation (PEP 561)."""
    assert (packages()[name] / "py.typed").is_file()


@pytest.mark.parametrize(
    "point", DISTRIBUTION.entry_points, ids=lambda point: f"{point.group}:{point.name}"
)
def test_every_entry_point_resolves(point: metadata.EntryPoint) -> None:
    """The command, each backend and the pytest plugin are where the metadata says."""
    if "directory.ray" in point.value:  # whose library has no build for every Python
        pytest.importorskip("ray", reason="ray is not installed: `make test-ray`")
    assert point.load() is not None


def test_every_packaged_backend_is_offered() -> None:
    """A backend that no entry point names cannot be found."""
    offered = {
        point.value.partition(":")[0]
        for point in DISTRIBUTION.entry_points
        if point.group == "kvwire.backends"
    }
    packaged = {Path(name).name for name in packages("")} - {"kvwire"}
    assert offered == packaged


def test_every_backend_in_the_tree_is_packaged() -> None:
    """A folder that pyproject.toml forgets would be missing from the wheel only."""
    if not _SOURCE_TREE:
        pytest.skip("the installed wheel has no backends/ folder to compare with")
    in_tree = {f"backends/{path.name}" for path in (ROOT / "backends").glob("kvwire_*")}
    assert in_tree | {"kvwire"} == set(packages(""))


def test_the_metadata_says_what_a_user_must_know() -> None:
    """Licence, supported Pythons, typing, and the README as its description."""
    said = DISTRIBUTION.metadata
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    assert said["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in (said.get_all("Classifier") or [])
    (readme,) = sources("README.md")
    assert said.json["description"] == readme.text


def test_the_core_install_is_small() -> None:
    """A dependency is a decision: docs/adr/01-dependencies.md names each of these."""
    required = [
        re.split(r"[^A-Za-z0-9_.-]", requirement)[0]
        for requirement in DISTRIBUTION.requires or []
        if "extra ==" not in requirement
    ]
    assert sorted(required) == sorted(
        ["msgspec", "numpy", "uvloop", "xxhash", "cyclopts", "rich"]
    )
    (decision,) = sources("docs/adr/01")
    assert all(name in decision.text for name in required)


def test_the_wheel_carries_its_packages_and_nothing_else() -> None:
    """No tests, no docs, no second top-level folder in somebody's site-packages."""
    if _SOURCE_TREE:
        pytest.skip("an editable install lists no files; .ci/run tests the wheel")
    tops = {Path(str(file)).parts[0] for file in DISTRIBUTION.files or []}
    own = {Path(name).name for name in packages("")}
    others = {top for top in tops if top not in own and top != ".."}
    assert all(other.endswith(".dist-info") for other in others), others
    assert own <= tops


def test_users_are_not_offered_what_contributors_need() -> None:
    """An extra is for somebody who uses kvwire, a group for who works on it."""
    extras = set(DISTRIBUTION.metadata.get_all("Provides-Extra") or [])
    assert extras == set(project()["project"]["optional-dependencies"])
    assert not extras & set(project()["dependency-groups"])


def test_requirements_of_a_group_include_those_of_others() -> None:
    done = python(ROOT / ".ci" / "group", "dev", check=True)
    printed = done.stdout.splitlines()
    groups = project()["dependency-groups"]
    assert set(groups["test"]) < set(printed)
    assert {wanted for wanted in groups["dev"] if isinstance(wanted, str)} < set(
        printed
    )
    unknown = python(ROOT / ".ci" / "group", "development")
    assert unknown.returncode
    assert "no group development: test, dev," in unknown.stderr


@pytest.mark.parametrize("group", sorted(project()["dependency-groups"]))
def test_what_tests_and_tools_need_is_locked(group: str) -> None:
    """A release of somebody else changes nothing here until `make lock` takes it."""
    locked = [
        Requirement(line) for line in _locked.read_text().splitlines() if line.strip()
    ]
    needs = project()["dependency-groups"][group]
    for wanted in (Requirement(need) for need in needs if isinstance(need, str)):
        found = [one for one in locked if one.name == canonicalize_name(wanted.name)]
        assert found, f"{wanted}: run `make lock`"
        for one in found:
            (pin,) = one.specifier
            assert pin.operator == "=="
            assert wanted.specifier.contains(pin.version, prereleases=True), wanted


def test_declared_entry_points_are_the_installed_ones() -> None:
    """An install older than pyproject.toml is told apart from a broken one."""
    declared = project()["project"]
    expected = {("console_scripts", name) for name in declared["scripts"]}
    for group, points in declared["entry-points"].items():
        expected |= {(group, name) for name in points}
    installed = {(point.group, point.name) for point in DISTRIBUTION.entry_points}
    assert installed == expected, "run `make test`: the install is out of date"


# As in an image to which only the packages were copied, or in a frozen program.
WITHOUT_METADATA = """
import asyncio
from importlib import metadata

finder = metadata.MetadataPathFinder
every = finder.find_distributions

def without_kvwire(*arguments, **named):
    return (d for d in every(*arguments, **named) if "kvwire" not in d.metadata["Name"])

finder.find_distributions = without_kvwire

import kvwire
from kvwire.extras import offered

async def main():
    async with kvwire.open() as here, kvwire.open() as there:
        connection = await there.connect(await here.listen("127.0.0.1:0"))
        accepted = await here.accept()
        await connection.send(1, b"hello")
        print(bytes(await accepted.recv(1)).decode())

asyncio.run(main())
for group in ("kvwire.backends", "kvwire.directories"):
    for point in offered(group):
        print(group, point.name, point.value)
"""


def test_copied_packages_without_metadata_offer_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_METADATA],
        capture_output=True,
        text=True,
        check=False,
    )
    hello, *offered = done.stdout.splitlines() or [done.stderr]
    assert hello == "hello"
    declared = project()["project"]["entry-points"]
    assert {line for line in offered if "kvwire" in line.split()[2]} == {
        f"{group} {name} {value}"
        for group in ("kvwire.backends", "kvwire.directories")
        for name, value in declared[group].items()
    }


def test_a_released_readme_leads_to_its_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An index has no other file of the tree; builds without an address name none."""
    pytest.importorskip("hatchling", reason="no hatchling: make .venv/.installed-dev")
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["AddressesHook"](str(ROOT), {})
    (readme,) = sources("README.md")

    def built() -> dict[str, Any]:
        metadata: dict[str, Any] = {"version": "7.8.9"}
        hook.update(metadata)
        return metadata

    monkeypatch.delenv("KVWIRE_REPOSITORY", raising=False)
    assert built()["urls"] == {}
    assert built()["readme"]["text"] == readme.text

    monkeypatch.setenv("KVWIRE_REPOSITORY", "https://example.org/a/b/")
    at = "https://example.org/a/b"
    assert built()["urls"]["Source"] == at
    text = built()["readme"]["text"]
    assert f"]({at}/blob/v7.8.9/docs/index.md)" in text
    links = re.findall(r"!?\]\(([^)]+)\)", text)
    assert links
    assert all(link.startswith(("https://", "#")) for link in links), links


def test_the_notes_of_a_tag_are_those_of_its_tree(tmp_path: Path) -> None:
    """A tag of another version, or with changes left over, makes no release."""
    for name in (".ci", "kvwire", "changes"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / ".ci" / "notes", tmp_path / ".ci")
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    version = f'__version__ = "{kvwire.__version__}"\n'
    (tmp_path / "kvwire" / "__init__.py").write_text(version)

    def notes(tag: str) -> tuple[int, str]:
        done = ran("bash", tmp_path / ".ci" / "notes", tag)
        return done.returncode, done.stdout + done.stderr

    status, text = notes(f"v{kvwire.__version__}")
    assert status == 0
    assert "The first release" in text
    assert "## [" not in text
    assert notes("v99.1") == (
        1,
        f"v99.1 is no release: kvwire/__init__.py has version {kvwire.__version__}\n",
    )
    (tmp_path / "changes" / "+left.added.md").touch()
    status, text = notes(f"v{kvwire.__version__}")
    assert status == 1
    assert text.endswith("changes/ still has changes/+left.added.md\n")


def test_a_release_has_one_version_and_the_changes_of_its_files(tmp_path: Path) -> None:
    """The first one's notes are written; without changes there is no further one."""
    versioned = tmp_path / "kvwire" / "__init__.py"
    versioned.parent.mkdir()
    shutil.copy(kvwire.__file__, versioned)  # the tree has none beside a wheel
    names = ["CHANGELOG.md", "changes", ".ci/notes", ".ci/release"]
    for name in [*names, *(f"{folder}/pyproject.toml" for folder in projects())]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    notes = tmp_path / "CHANGELOG.md"
    heading = re.compile(rf"^## \[{re.escape(kvwire.__version__)}\].*$", re.MULTILINE)
    notes.write_text(heading.sub("## [7.8.9] - not released yet", notes.read_text()))

    def release(version: str) -> tuple[int, str]:
        done = ran("bash", tmp_path / ".ci" / "release", version)
        return done.returncode, done.stdout + done.stderr

    assert release("7") == (1, "7 is no version: write 0.2.0, or 0.2.0rc1\n")
    for path in (tmp_path / "changes").glob("+*.md"):
        path.unlink()
    why = "changes/ has no file, so 7.9.0 would say nothing\n"
    assert release("7.9.0") == (1, why)
    status, text = release("7.8.9")
    assert status == 0, text
    assert "The first release" in text
    assert re.search(r"\n## \[7\.8\.9\] - \d{4}-\d\d-\d\d\n", notes.read_text())
    assert '__version__ = "7.8.9"' in versioned.read_text()
    for folder in projects():
        wanted = (tmp_path / folder / "pyproject.toml").read_text()
        assert set(re.findall(r'"kvwire(?:-\w+)?==(.*?)"', wanted)) == {"7.8.9"}


# --- what stands on kvwire in packages/: one version, one layout, one contract --------


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
