"""A file for Perfetto: slices, instants, and an arrow from the one end to the other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import kvwire
import kvwire_store
from kvwire.observe.inspect import ProcessTrace
from kvwire.observe.trace import document
from kvwire.runtime.trace_ring import RINGS
from tests.scenarios.world import World, play, scenario
from tests.support.caches import Memory

LIST, DEST = [1, 2, 3], [11, 12, 13]


def named(rows: list[dict[str, Any]], phase: str) -> list[str]:
    return [row["name"] for row in rows if row["ph"] == phase]


@pytest.mark.parametrize("push", [False, True])
def test_both_ends_are_one_trace(push: bool, tmp_path_factory: Any) -> None:
    folder = str(tmp_path_factory.mktemp("i") / "run")

    async def run(w: World) -> None:
        inc = w.consume("t", DEST, push=push)
        out = w.produce("t", LIST, push=push)
        out.ready()
        out.finish()
        await inc
        await out
        assert inc.traceparent.split("-")[1] == out.traceparent.split("-")[1]
        assert len(inc.traceparent) == 55
        await w.until(lambda: not w.p.transfers())
        (ring,) = RINGS.values()
        rows = document([ProcessTrace("both", 1, tuple(ring.events))])["traceEvents"]
        assert sorted(named(rows, "X")) == ["receive t", "send t"]
        assert {"marked", "sent layer 0", "landed layer 0"} <= {*named(rows, "i")}
        assert named(rows, "s") == named(rows, "f") == ["transfer"]
        start, end = (r for r in rows if r["ph"] in "sf")
        slices = {r["name"]: r for r in rows if r["ph"] == "X"}
        assert start["tid"] == slices["send t"]["tid"] != end["tid"]
        assert slices["receive t"]["args"]["outcome"] == "complete"
        assert msgspec.json.encode(rows)

    play(run, "inproc", inspect=folder)


@scenario("inproc")
async def test_nobody_who_does_not_trace_is_in_a_trace(w: World) -> None:
    out = w.p.publish("t", w.source.cache, LIST)
    assert out.traceparent == ""
    out.abort()
    assert not RINGS


def test_what_a_transfer_that_was_cut_leaves() -> None:
    events = (
        (1_000, "landed", "early", (0, 1, 10)),
        (2_000, "begin", "a", ("x", "receive")),
        (3_000, "begin", "b", ("y", "receive")),
        (4_000, "lost", "a", ()),
        (5_000, "end", "a", ("failed", 0, "00")),
        (6_000, "begin", "c", ("z", "receive")),
        (9_000, "met", "c", ("peer",)),
    )
    rows = document([ProcessTrace("p", 1, events)])["traceEvents"]
    slices = {row["name"]: row for row in rows if row["ph"] == "X"}
    where = {name: (row["tid"], row["dur"]) for name, row in slices.items()}
    # The first track is free again when z begins; what is open reaches to the end.
    assert where == {"receive x": (1, 3), "receive y": (2, 6), "receive z": (1, 3)}
    assert slices["receive z"]["args"]["peer"] == "peer"
    assert named(rows, "i") == ["lost", "end", "met"]
    assert not named(rows, "s")


async def test_store_calls_are_in_it(tmp_path: Any) -> None:
    cache = Memory().cache
    async with (
        kvwire_store.BlockStore.open(["memory:1MiB"]) as store,
        kvwire.open(inspect=str(tmp_path / "run")),
    ):
        await store.put([b"one"], cache, [0])
        (ring,) = RINGS.values()
        assert [(what, more[:2]) for _, what, _, more in ring.events] == [
            ("begin", ("1 blocks", "put")),
            ("end", ("over", 0)),
        ]
