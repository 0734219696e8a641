"""What the pages for operators say of the code, of systemd and of Kubernetes."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tree import ROOT

HOWTO = ROOT / "docs" / "howto"
# Stands in a text of the code for what is formatted into it.
_HOLE = "\0"


def texts(tree: ast.AST) -> Iterator[str]:
    """Each text of a file, what is formatted into it as a hole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = node.values
            yield "".join(
                str(p.value) if isinstance(p, ast.Constant) else _HOLE for p in parts
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d)?[rsdg]", _HOLE, node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield "".join(texts(node.left)) + "".join(texts(node.right))


def code_texts() -> set[str]:
    """Every text of the code that is installed."""
    found: set[str] = set()
    for name in ("", "_local", "_tcp", "_ucx", "_store"):
        spec = importlib.util.find_spec(f"kvwire{name}")
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for file in Path(folder).rglob("*.py"):
                found.update(texts(ast.parse(file.read_text())))
    return found


def quoted_messages(page: str) -> list[str]:
    """What stands as code in the first column of a page's tables."""
    return re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE)


def said_by(message: str, known: set[str]) -> bool:
    """Whether a text of the code can say this; ``...`` is anything."""
    parts = (re.escape(part.strip()) for part in message.split("..."))
    # A word that the system says, such as that of an errno, is formatted in.
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in known)


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    known = code_texts()
    messages = quoted_messages((HOWTO / "troubleshooting.md").read_text())
    assert len(messages) >= 40
    system = {
        "cannot connect to ...: Connection refused": "cannot connect to ...: ...",
        "cannot connect to ...: no answer within ... s": "no answer within ... s",
    }
    unsaid = [m for m in messages if not said_by(system.get(m, m), known)]
    assert not unsaid


def test_a_message_that_nobody_says_is_found() -> None:
    known = {f"the peer {_HOLE} has not published it", "a, b"}
    assert said_by("the peer ... has not published it", known)
    assert not said_by("the peer ... has published it", known)
    assert quoted_messages("| `a ...` | why | do |\n| b | `c` | d |\n") == ["a ..."]


def block(language: str) -> str:
    """The one block of a language on the page of deployment."""
    page = (HOWTO / "deployment.md").read_text()
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    return str(found)


def test_the_unit_starts_what_there_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block("ini"))
    command = unit["Service"]["ExecStart"].replace("\\\n", " ").split()
    assert command[0].endswith("bin/kvwire")
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert all(f"`{w}" in reference for w in command if w.startswith("--"))


def test_the_manifests_fit_the_example_and_each_other() -> None:
    """Ports, probes, mounts and the time that a pod has to go down."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, *deployments = yaml.safe_load(block("yaml"))["items"]
    example = (ROOT / "examples" / "fastapi_pair.py").read_text()
    request_s = float(re.findall(r"REQUEST_S: Final = ([\d.]+)", example)[0])
    for deployment in deployments:
        spec = deployment["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        wait_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > wait_s + request_s + 5
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        ports = {port["containerPort"] for port in container["ports"]}
        assert {port for port, _ in probes(container)} == ports
        assert {path for _, path in probes(container)} <= {"/health", ""}
        assert all(option in example for option in container["command"][2:3])
    labels = deployments[0]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert (
        f"http://prefill:{service['spec']['ports'][0]['port']}" in container["command"]
    )


def probes(container: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Port and path of each probe."""
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(name, {})
        for kind in ("httpGet", "tcpSocket"):
            if kind in probe:
                yield probe[kind]["port"], probe[kind].get("path", "")
