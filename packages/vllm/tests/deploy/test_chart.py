"""The image and the chart: what the tools of their field say of them.

`make manifests` installs these tools; without them each test says so and is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvwire.types import Address
from kvwire_vllm.config import VllmSettings
from kvwire_vllm.proxy.command import _parser as parser_of_the_proxy
from tests.support.linters import INSTALL, checked
from tests.support.runs import python
from tests.support.tree import ROOT

DEPLOY = Path("packages/vllm/deploy")
CHART = ROOT / DEPLOY / "chart"
# What the chart says that it runs on, and the newest that the schemas have.
KUBERNETES = ("1.27", "1.37")
# Keys that a connector shares with every configuration.
CONFIG_KEYS = {"trust", "psk_file", "directory"}
# Each a way in which the chart is used.
USES = sorted(path.name for path in (CHART / "ci").glob("*-values.yaml"))
pytestmark = pytest.mark.slow  # `make manifests` runs them


def test_the_image() -> None:
    checked("hadolint", str(DEPLOY / "Dockerfile"))


def test_the_schema_of_the_charts_values() -> None:
    checked(
        *("check-jsonschema", "--check-metaschema"),
        str(DEPLOY / "chart" / "values.schema.json"),
    )


def values_of(use: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    values = yaml.safe_load((CHART / "ci" / use).read_text())
    assert isinstance(values, dict)
    return values


# In a process of its own: the library is Go's, and keeps descriptors.
HELM = """\
import json, sys
from helm_python.chart import Chart, lint
folder, values = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps({
    "lint": lint(folder, values, strict=True),
    "files": Chart.load(folder).render(values, name="fleet", namespace="kv"),
}))
"""


def helm(values: dict[str, Any]) -> dict[str, Any]:
    """What Helm says of the chart, and what it makes of it."""
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip(f"Helm is {INSTALL}")
    done = python("-c", HELM, str(CHART), json.dumps(values))
    if done.returncode:
        raise ValueError(done.stderr)
    said = json.loads(done.stdout)
    assert isinstance(said, dict)
    return said


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifests that Helm makes of the chart."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    documents = [
        document
        for path, text in helm(values)["files"].items()
        if not path.endswith(".txt")
        for document in yaml.safe_load_all(text)
        if document
    ]
    assert documents
    return documents


@pytest.mark.parametrize("use", USES)
def test_the_chart(use: str) -> None:
    report = helm(values_of(use))["lint"]
    assert report["total_charts_linted"] == 1
    assert report["errors"] == []


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("version", KUBERNETES)
def test_the_manifests(use: str, version: str) -> None:
    """Each field is one of Kubernetes, of the type that it has there."""
    schemas = pytest.importorskip(
        "kubernetes_validate", reason=f"kubernetes-validate is {INSTALL}"
    )
    kinds = set()
    for document in rendered(values_of(use)):
        schemas.validate(document, version, strict=True)
        kinds.add(document["kind"])
    assert kinds == {"Service", "StatefulSet", "Deployment", "NetworkPolicy"}
    wrong = {**document, "spec": {**document["spec"], "replica": 1}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, version, strict=True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"image": ""}, "image"),
        ({"directory": "redis://valkey:6379", "allow": []}, "allow"),
        ({"directory": "valkey"}, "directory"),
        ({"store": {"memory": "8Gi"}}, "memory"),
        ({"replicas": 3}, "replicas"),
        ({"family": "IPv5"}, "family"),
    ],
)
def test_values_that_cannot_work_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        helm({**values_of("names-values.yaml"), **change})


def containers(use: str, **more: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The containers of the pods, each with its pod's name."""
    for document in rendered({**values_of(use), **more}):
        if document["kind"] in {"StatefulSet", "Deployment"}:
            (container,) = document["spec"]["template"]["spec"]["containers"]
            yield document["metadata"]["name"], container


@pytest.mark.parametrize("use", USES)
def test_pods_run_what_there_is(use: str) -> None:
    """Options of the commands, and keys of the connectors."""
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for name, container in containers(use):
        arguments = container["args"]
        if name == "fleet-proxy":
            assert container["command"][1:] == ["-m", "kvwire_vllm.proxy"]
            parser_of_the_proxy().parse_args(arguments)
        elif name == "fleet-store":
            options = {argument.partition("=")[0] for argument in arguments}
            assert options
            assert {o for o in options if f"`{o}" not in reference} == set()
        else:
            transfer = json.loads(
                arguments[arguments.index("--kv-transfer-config") + 1]
            )
            extra = transfer["kv_connector_extra_config"]
            for child in extra.get("connectors", [transfer]):
                if child["kv_connector"] == "KvwireConnector":
                    keys = child["kv_connector_extra_config"].keys()
                    known = set(VllmSettings.__struct_fields__) | CONFIG_KEYS
                    assert keys <= known
                    assert ("directory" in keys) == (use == "directory-values.yaml")


@pytest.mark.parametrize("pod", ["10.0.0.7", "fd00:10:244::7"])
@pytest.mark.parametrize("use", USES)
def test_pods_of_both_families(use: str, pod: str) -> None:
    """Their engines listen where they are, and the store everywhere."""
    family = "IPv6" if ":" in pod else "IPv4"
    for name, container in containers(use, family=family):
        text = " ".join(container["args"]).replace("$(POD_IP)", pod)
        if name == "fleet-store":
            assert "--listen=[::]:7500" in text
            assert "--metrics=[::]:9400" in text
        elif name == "fleet-proxy":
            assert "--host=::" in text
        else:
            (listen,) = re.findall(r'"listen":"([^"]+)"', text)
            assert Address.parse(listen).host == pod
            for url in re.findall(r'"http":"([^"]+)"', text):
                assert urlsplit(url).hostname == pod


def test_the_proxy_is_given_every_engine() -> None:
    """By the names that a StatefulSet and its Service give to pods."""
    arguments = dict(containers("names-values.yaml"))["fleet-proxy"]["args"]
    options = parser_of_the_proxy().parse_args(arguments)
    first = "fleet-prefill-0.fleet-prefill"
    assert options.prefill == [f"http://{first}:8100={first}:7400,{first}:7401"]
    assert [text.partition("=")[0] for text in options.decode] == [
        f"http://fleet-decode-{number}.fleet-decode:8100" for number in range(2)
    ]
