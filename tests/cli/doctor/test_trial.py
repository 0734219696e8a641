"""When a report says that all is well."""

from __future__ import annotations

from dataclasses import replace

from kvwire.cli.doctor.trial import PeerReport, Rate, Trial
from kvwire.types import Candidate
from tests.cli.doctor.trees import examination

RATE = Rate(verb="put", fragment_bytes=4096, bytes_per_s=1e9, passes=1)
GOOD = Trial(candidates=(Candidate("tcp", True, ""),), rates=(RATE,))


def report(*trials: Trial) -> PeerReport:
    return PeerReport(address="", here=examination(), there=None, trials=trials)


def test_the_transport_taken() -> None:
    assert GOOD.taken == "tcp"
    assert Trial(candidates=(Candidate("ucx", False, ""),)).taken == ""


def test_one_good_trial_is_enough() -> None:
    assert report(Trial(error="no libucp"), GOOD).well


def test_nothing_measured_is_not_well() -> None:
    assert not report().well
    assert not report(replace(GOOD, error="lost")).well


def test_damage_is_never_well() -> None:
    assert not report(GOOD, replace(GOOD, damaged=("put",))).well
