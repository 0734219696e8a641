"""What `make` installs into is whole, or is made anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.support.runs import ran
from tests.support.servers import free_port
from tests.support.tree import ROOT

pytestmark = pytest.mark.slow  # each makes a virtual environment or two

VENV = ".venv-made"
STAMP = f"{VENV}/.installed"
WHEEL = "nothing-1-py3-none-any.whl"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the script, and a wheel that has nothing in it."""
    made = tmp_path / "a tree"
    (made / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "environment", made / ".ci")
    with zipfile.ZipFile(made / WHEEL, "w") as wheel:
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: nothing\nVersion: 1\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            wheel.writestr(f"nothing-1.dist-info/{name}", text)
    return made


def environment(tree: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run the script; returns its status, and what it says."""
    done = ran(
        tree / ".ci" / "environment", *arguments, env={**os.environ, **variables}
    )
    assert not done.stdout
    return done.returncode, done.stderr


def test_an_environment_that_is_not_whole_is_made_anew(tree: Path) -> None:
    assert environment(tree, STAMP, "--no-index", f"./{WHEEL}") == (0, "")
    stamp, python = tree / STAMP, tree / VENV / "bin" / "python"
    whole = stamp.read_text()

    def is_left() -> bool:
        _, said = environment(tree)
        assert ("is made anew" in said) == (not stamp.exists())
        left = stamp.exists()
        stamp.write_text(whole)
        return left

    assert is_left()
    # A pip that fails has undone what it did; one that was killed has not.
    status, said = environment(tree, VENV, "--no-index", "no-such-package")
    assert (status, "no-such-package" in said) == (1, True)
    assert is_left()
    (tree / VENV / ".installing").touch()
    assert not is_left()
    (tree / VENV / ".installing").unlink()
    # Another python, or none.
    target = python.readlink()
    for other in (shutil.which("true"), "/none/python3"):
        python.unlink()
        python.symlink_to(str(other))
        assert not is_left()
    python.unlink()
    python.symlink_to(target)
    assert is_left()
    moved = tree.rename(tree.with_name("moved"))
    assert "is made anew" in environment(moved)[1]
    assert not (moved / STAMP).exists()
    # What is there without a stamp is no base for another one.
    (moved / VENV / "left").touch()
    assert environment(moved, STAMP, "--no-index", f"./{WHEEL}") == (0, "")
    assert not (moved / VENV / "left").exists()


def test_without_a_network_it_says_so_in_one_line(tree: Path) -> None:
    index = f"http://127.0.0.1:{free_port()}/simple"
    status, said = environment(
        tree,
        *(STAMP, "no-such-package"),
        PIP_INDEX_URL=index,
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
    )
    assert (status, said.count("\n")) == (1, 1)
    assert f"{VENV}: pip reaches no package index ([Errno" in said
    assert "Connection refused" in said
    assert not (tree / STAMP).exists()


def test_one_at_a_time(tree: Path) -> None:
    """Two at once in one tree: neither breaks what the other makes."""
    command = [str(tree / ".ci" / "environment"), STAMP, "--no-index", f"./{WHEEL}"]
    both = [subprocess.Popen(command, cwd=tree) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    assert environment(tree) == (0, "")
    assert (tree / STAMP).exists()


def test_groups_without_a_pip_that_knows_them(tree: Path) -> None:
    """Their requirements are given to pip, those of included groups as well."""
    shutil.copy(ROOT / ".ci" / "group", tree / ".ci")
    (tree / "pyproject.toml").write_text(
        "[dependency-groups]\ntest = [\"nothing>=1; python_version >= '3'\"]\n"
        'dev = [{ include-group = "test" }]\n'
    )
    links = ("--no-index", "--find-links", ".")
    assert environment(tree, STAMP, *links, "--group", "dev") == (0, "")
    (site,) = (tree / VENV / "lib").glob("python*/site-packages")
    assert list(site.glob("nothing-1.dist-info"))
    status, said = environment(tree, STAMP, *links, "--group", "docs")
    assert (status, "no group docs: test, dev" in said) == (1, True)
