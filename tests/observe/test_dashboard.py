"""The dashboard and the alert rules ask for metrics that the collectors have."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import kvwire
from kvwire.integrations.vllm.metrics import FIELDS
from kvwire.observe.prometheus import CommunicatorCollector, StoreCollector
from tests.support.tree import ROOT

FOLDER: Final = ROOT / "docs" / "observe"
_NAME: Final = re.compile(r"\bkvwire_\w+")
_SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


async def exported() -> set[str]:
    async with (
        kvwire.open() as communicator,
        kvwire.BlockStore.open(["memory:1MiB"]) as store,
    ):
        families = [
            *CommunicatorCollector(communicator).collect(),
            *StoreCollector(store).collect(),
        ]
    return {f.name + end for f in families for end in _SUFFIXES.get(f.type, ("",))}


async def test_every_metric_that_is_asked_for_is_exported() -> None:
    names = await exported()
    for file in ("grafana.json", "alerts.yaml"):
        asked = set(_NAME.findall((FOLDER / file).read_text()))
        assert len(asked) > 5
        assert not asked - names, file


def test_every_metric_of_the_connector_is_on_its_page() -> None:
    page = (ROOT / "docs" / "howto" / "vllm.md").read_text()
    named = set(re.findall(r"`vllm:kvwire_(\w+)`", page))
    assert named == set(FIELDS)


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    """The fields of its published schema that a time series needs."""
    found: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    assert found["schemaVersion"] >= 36
    assert {"title", "uid", "panels", "templating", "time"} <= found.keys()
    places = set()
    for panel in found["panels"]:
        assert panel["type"] == "timeseries"
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24
        places.add((where["x"], where["y"]))
        (target,) = panel["targets"]
        assert target["expr"].count("(") == target["expr"].count(")")
        assert panel["datasource"]["uid"] == "${datasource}"
    numbers = [panel["id"] for panel in found["panels"]]
    assert len(places) == len(set(numbers)) == len(numbers)
