"""Workflows and the citation: what the tools of their field say of them.

`make manifests` installs these tools; without them each test says so and is skipped.
"""

from __future__ import annotations

import pytest

from tests.support.linters import checked
from tests.support.tree import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.slow  # `make manifests` runs them


def test_workflows() -> None:
    checked("actionlint", "-no-color", *map(str, WORKFLOWS))


def test_workflows_are_safe() -> None:
    """Rights, pinned actions, texts of strangers in commands."""
    checked("zizmor", "--offline", "--quiet", ".github")


def test_the_citation() -> None:
    checked(
        *("check-jsonschema", "--builtin-schema", "vendor.citation-file-format"),
        "CITATION.cff",
    )


def test_steps_of_workflows_are_targets() -> None:
    """What fails there fails in a clone, by the same command."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    makefile = (ROOT / "Makefile").read_text()
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for line in "\n".join(s.get("run", "") for s in job["steps"]).splitlines():
                words = [word for word in line.split() if not word.startswith("--")]
                match words:
                    case ["make", target, *_]:
                        assert f"\n{target}:" in makefile, line
                    case ["gh", "release", "create", *_] | []:
                        pass
                    case [script]:
                        assert (ROOT / script).is_file(), line
                    case _:
                        pytest.fail(f"{path.name}: {line}")
