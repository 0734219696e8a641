"""``kvwire certify``: its exit status, files and reports."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from kvwire.cli.main import main
from kvwire_certify import Breach, Certificate
from kvwire_certify.oracle import RULES
from kvwire_certify.schedule import effective
from kvwire_certify.transport import TARGETS
from tests.support.runs import Beside, beside, python
from tests.support.tree import ROOT

PLANTS = ROOT / "packages" / "certify" / "tests" / "plants.py"


def test_a_healthy_transport(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit = tmp_path / "junit.xml"
    files = ["--junit", str(junit), "--into", str(tmp_path)]
    assert main(["certify", "toy", "--schedules", "2", *files]) == 0
    said = capsys.readouterr().out
    assert "toy: 2 schedules" in said
    unchecked = ["busy-idle", "leak-memory", "leak-descriptor", "leak-thread"]
    assert said.count("kept ") == len(RULES) - len(unchecked)
    assert f"not checked: {', '.join(unchecked)}" in said
    suite = ET.parse(junit).getroot()
    assert [case.get("name") for case in suite] == list(RULES)
    assert suite.get("failures") == "0"
    assert suite.get("skipped") == str(len(suite.findall("*/skipped"))) == "4"
    assert not list(tmp_path.glob("*.json"))


def test_a_breach_is_kept_and_plays_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit = tmp_path / "junit.xml"
    options = ["--schedules", "1", "--seed", "9", "--times", "1", "--json"]
    options += ["--into", str(tmp_path), "--junit", str(junit)]
    assert main(["certify", f"{PLANTS}:hole", *options]) == 1
    said, progress = capsys.readouterr()
    assert progress.startswith("seed 9: hole: ")
    (breach,) = msgspec.json.decode(said, type=Certificate).breaches
    assert breach.seeds == (9,)
    assert saved(tmp_path) == breach
    (file,) = tmp_path.glob("*.json")
    assert f"run it again: kvwire certify {file}" in progress
    assert ET.parse(junit).getroot().get("failures") == "1"

    assert main(["certify", str(file), "--times", "1"]) == 1
    said, progress = capsys.readouterr()
    assert "bytes that landed were never written" in said
    assert not progress


def test_a_breach_is_kept_if_a_report_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--schedules", "1", "--seed", "9", "--times", "1"]
    options += ["--into", str(tmp_path), "--junit", str(tmp_path)]
    assert main(["certify", f"{PLANTS}:hole", *options]) != 0
    assert saved(tmp_path).rule == "hole"
    (file,) = tmp_path.glob("*.json")
    error = capsys.readouterr().err
    assert "Is a directory" in error
    assert f"run it again: kvwire certify {file}" in error


def saved(folder: Path) -> Breach:
    (file,) = folder.glob("*.json")
    return msgspec.json.decode(file.read_bytes(), type=Breach)


async def test_ctrl_c_ends_with_a_report(tmp_path: Path) -> None:
    command = ["-m", "kvwire", "certify", f"{PLANTS}:hole", "--into", str(tmp_path)]
    async with beside(*command, kind=Beside, logs=True) as run:
        assert "hole" in await run.line()
        run.signal(signal.SIGINT)
        while "Ctrl-C" not in await run.line():
            pass
        assert await run.wait() == 1
    assert len(saved(tmp_path).seeds) < 10


def test_what_comes_with_kvwire() -> None:
    """What each target needs is looked up, and nothing of it is imported."""
    needed = {module for needs in TARGETS.values() for module in needs.modules}
    code = (
        "import sys; from kvwire.cli.main import main; main(['certify']); "
        f"print('imported', *{needed} & {{*sys.modules}})"
    )
    done = python("-c", code, check=True)
    *lines, last = done.stdout.splitlines()
    assert last == "imported"
    rows = [line.split() for line in lines if not line.startswith(" ")]
    assert [row[0] for row in rows[1:]] == list(TARGETS)
    assert ["toy", "nothing", "more"] in rows


@pytest.mark.parametrize("library", ["", "system", "/nowhere/libucp.so.0"])
def test_ucx_is_found_as_the_doctor_finds_it(library: str) -> None:
    """It may be the system's, without a package of Python."""
    code = (
        "from kvwire.backend import registry; from kvwire.cli.main import main; "
        "print(registry.availability('ucx').reason); main(['certify'])"
    )
    env = {**os.environ, "LIBUCP": library, "COLUMNS": "80"}
    done = python("-c", code, check=True, env=env)
    reason, _, table = done.stdout.partition("\n")
    assert "".join(reason.split()) in "".join(table.split())


def test_the_page_of_findings_names_every_saved_schedule() -> None:
    page = (ROOT / "docs" / "topics" / "certified.md").read_text()
    files = sorted((ROOT / "docs" / "field-reports").glob("*.json"))
    assert files
    for file in files:
        breach = msgspec.json.decode(file.read_bytes(), type=Breach)
        assert effective(breach.schedule.steps)
        assert f"| `{file.stem}` |" in page


@pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is not None, reason="ucxx is installed here"
)
def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "ucxx"]) != 0
    text = "certify ucxx needs ucxx, which is not installed: pip install ucxx-cu12"
    assert text in capsys.readouterr().err


def test_a_tier_is_checked_and_needs_the_store(tmp_path: Path) -> None:
    """The store is a package of its own, which another user of certify has not."""
    code = "import sys; from kvwire.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = ["certify", "tier", f"disk:{tmp_path}/blocks?size=64MiB"]
    done = python("-c", code, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " checks passed in " in done.stdout.splitlines()[-1]
    done = python(
        "-c", f"import sys; sys.modules['kvwire_store'] = None; {code}", *command
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "certify tier needs kvwire_store" in done.stderr
    assert "pip install " in done.stderr


def test_an_adapter_has_modules_beside_it(tmp_path: Path) -> None:
    """Where the command is a script, its own folder is the first of the path."""
    (tmp_path / "beside.py").write_text(
        "from kvwire_certify.targets.toy import Toy as Base\n"
    )
    (tmp_path / "mine.py").write_text("from beside import Base\n")
    code = "import sys; from kvwire.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for target in ("mine.py:Base", "mine:Base"):
        command = ["-P", "-c", code, "certify", target, "--schedules", "1"]
        done = python(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("tory", "is neither module:Class nor file.py:Class; did you mean 'toy'?"),
        ("nowhere.py:Thing", "file nowhere.py does not exist in /"),
        ("[/]", "target '[/]' is neither module:Class nor file.py:Class"),
        (f"{PLANTS}:hold", "plants.py has no hold; did you mean 'hole'?"),
        (f"{PLANTS}", "lacks a class; known are "),
        (f"{PLANTS}:KEPT", "must be a subclass of kvwire_certify.End"),
        ("kvwire_certify:End", "has neither get nor put"),
        (f"{ROOT / 'package.json'}", "package.json"),
    ],
)
def test_no_target(target: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", target]) != 0
    assert text in capsys.readouterr().err
