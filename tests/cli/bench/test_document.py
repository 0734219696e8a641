"""The JSON document: every sample, and what ran where."""

from __future__ import annotations

import json
import os
import platform

import kvwire
from kvwire.cli.bench.case import Benchmark, Missing
from kvwire.cli.bench.document import as_text, document
from kvwire.cli.bench.turns import take_turns
from tests.cli.bench.contenders import Scripted, case

WARM_UP = [0.0]


def test_everything_is_in_it_and_comes_back_from_json() -> None:
    ours = Scripted("kvwire", [WARM_UP, [1.0, 3.0], [2.0]])
    theirs = Scripted("other", [WARM_UP, [4.0], [4.0]])
    whole = Benchmark(
        name="x",
        cases=[case(ours, theirs, target=0.5)],
        missing=[Missing("iperf3", "install it")],
        notes=["a note"],
    )
    findings = take_turns(whole, 2, lambda _: None)
    found = json.loads(as_text(document(whole, findings, {"loop": "uvloop"})))

    assert found["benchmark"] == "x"
    assert found["kvwire"] == kvwire.__version__
    assert found["settings"] == {"loop": "uvloop"}
    assert found["machine"]["cpus"] == os.cpu_count()
    assert found["machine"]["python"] == platform.python_version()
    assert len(found["machine"]["load"]) == 3
    assert found["contenders"] == {
        "kvwire": {"version": "kvwire 1"},
        "other": {"version": "other 1"},
    }
    assert found["missing"] == [
        {"name": "iperf3", "remedy": "install it", "reason": "is not installed"}
    ]
    assert found["notes"] == ["a note"]

    (only,) = found["cases"]
    assert (only["unit"], only["target"]) == ("B/s", 0.5)
    assert (only["best"], only["ratio"], only["met"]) == ("other", 0.5, True)
    assert only["work"]["nbytes"] == 1024
    mine = only["contenders"]["kvwire"]
    assert mine["rounds"] == [[1.0, 3.0], [2.0]]
    assert (mine["count"], mine["median"], mine["mad"]) == (3, 2.0, 1.0)
    assert mine["cpu_s_per_gib"] == 131072.0
