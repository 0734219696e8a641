"""The dashboard and the alert rules ask for metrics that the collectors have."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from functools import partial
from typing import Any, Final

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

import kvwire
from kvwire.integrations.vllm.metrics import FIELDS
from kvwire.observe.prometheus import CommunicatorCollector, StoreCollector
from tests.observe.dashboard import (
    DASHBOARD,
    FOLDER,
    PROGRAM,
    busy_pair,
    panels,
    prometheus,
    query_of,
)
from tests.support.tree import ROOT
from tests.support.waiting import eventually

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


def test_grafanas_own_types_read_the_dashboard() -> None:
    """Its SDK knows every field: what it writes of what it read is the same again."""
    plugins.register_default_plugins()
    read = Dashboard.from_json(DASHBOARD)
    written = json.loads(JSONEncoder().encode(read))
    assert _kept(DASHBOARD, written) == DASHBOARD
    assert {panel["type"] for panel in written["panels"]} == {"timeseries"}


def test_no_two_panels_share_a_place_or_a_number() -> None:
    places = set()
    for panel in panels():
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24
        places.add((where["x"], where["y"]))
        assert len(panel["targets"]) == 1
    numbers = [panel["id"] for panel in panels()]
    assert len(places) == len(set(numbers)) == len(numbers)


def _kept(asked: object, written: Any) -> object:
    """What was written of the fields that were there; defaults are left out."""
    if isinstance(asked, dict):
        return {key: _kept(asked[key], written[key]) for key in asked if key in written}
    if isinstance(asked, list):
        return [_kept(*pair) for pair in zip(asked, written, strict=True)]
    return written


@pytest.mark.skipif(
    shutil.which(PROGRAM) is None,
    reason="no prometheus: apt-get install prometheus, or its release on the PATH",
)
async def test_a_prometheus_answers_each_panel_and_takes_the_rules() -> None:
    async with busy_pair() as port:
        with prometheus(port) as server:
            for panel in panels():
                answered = partial(server.answers, query_of(panel))
                assert await asyncio.to_thread(eventually, answered), panel["title"]
            groups = await asyncio.to_thread(server.ask, "rules")
    rules = [rule for group in groups["groups"] for rule in group["rules"]]
    assert len(rules) > 5
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}  # not evaluated yet
    assert not [rule for rule in rules if rule.get("lastError")]
