"""Commands of other distributions: found by name, and broken ones in one line."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from cyclopts import App

import kvwire
from kvwire.cli.main import main
from kvwire.cli.plug_ins import GROUP, Commands
from kvwire.extras import NotInstalledError
from tests.support.runs import python

COMMAND = """\
from cyclopts import App

app = App(name="{name}")


@app.default
def say(word: str = "hello") -> int:
    print("here:", word)
    return 3
"""


class Place:
    """A folder of installed distributions, each with one command.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, distribution: str, command: str, module: str, text: str) -> None:
        """Install a distribution whose command is ``module:app``."""
        (self._folder / f"{module}.py").write_text(text)
        info = self._folder / f"{distribution}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n"
            f"Summary: What {distribution} does\n"
        )
        points = f"[kvwire.commands]\n{command} = {module}:app\n"
        (info / "entry_points.txt").write_text(points)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``kvwire`` where they are installed."""
        env = {**os.environ, "PYTHONPATH": str(self._folder)}
        return python("-m", "kvwire", *arguments, env=env)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_command_is_listed_by_its_distribution_and_runs(place: Place) -> None:
    place.install("speaks", "greet", "speaking", COMMAND.format(name="greet"))
    assert "What speaks does." in place.run("--help").stdout
    shown = place.run("greet", "--help").stdout
    assert "What speaks does." in shown
    assert "--word" in shown
    done = place.run("greet", "you")
    assert (done.returncode, done.stdout, done.stderr) == (3, "here: you\n", "")


def test_each_command_of_a_package_has_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A package's summary describes more than one of its commands does."""
    assert main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for point in entry_points(group=GROUP):
        own = point.load().help
        assert own
        assert shown.count(f"{point.name} {own.splitlines()[0]}") == 1


def test_the_help_of_a_command_is_its_own(place: Place) -> None:
    text = COMMAND.format(name="greet").replace('")', '", help="Greets you.")', 1)
    place.install("speaks", "greet", "speaking", text)
    assert "Greets you." in place.run("greet", "--help").stdout


@pytest.mark.parametrize(
    "text", ["import no_such_module", "app = 1 / 0", "app: int"], ids=lambda text: text
)
def test_one_that_cannot_be_imported_is_one_line_and_the_others_run(
    place: Place, text: str
) -> None:
    place.install("broken", "greet", "breaking", text)
    done = place.run("greet")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvwire: the command 'greet' of broken cannot be imported: ")
    assert f"install broken again, in version {kvwire.__version__} of kvwire" in line
    assert "What broken does." in place.run("--help").stdout
    assert place.run("config", "show").returncode == 0


@pytest.mark.parametrize(
    ("name", "owners"), [("greet", "one and two"), ("doctor", "one and two and kvwire")]
)
def test_two_claims_for_a_name_are_an_error_when_it_is_called(
    place: Place, name: str, owners: str
) -> None:
    for distribution in ("one", "two"):
        text = COMMAND.format(name=name)
        place.install(distribution, name, f"of_{distribution}", text)
    done = place.run(name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"kvwire: the command {name!r} is claimed by {owners}; uninstall one of them\n"
    )
    assert place.run("config", "show").returncode == 0


def test_commands_of_packages_that_are_not_installed() -> None:
    """Each of this repository names its package; others are unknown."""
    commands = Commands(App(), ())
    commands.load("nobody")
    for point in entry_points(group=GROUP):
        assert point.dist is not None
        needed = f"{point.name!r} needs {point.dist.name}, which is not installed"
        with pytest.raises(NotInstalledError, match=needed):
            commands.load(point.name)
