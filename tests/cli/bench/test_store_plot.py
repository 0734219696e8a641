"""The two pictures of a store: who is in them, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.cli.bench.case import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Contender,
)
from kvwire.cli.bench.store_plot import draw
from kvwire.cli.bench.store_work import DISK, GET, MATCH, MEMORY, ONE, SHAPES, work_of
from kvwire.cli.bench.turns import take_turns
from kvwire.limits import MIB
from tests.cli.bench.contenders import Scripted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def case(tier: str, verb: str, shape: str, *beside: Contender) -> Case:
    return Case(
        name=f"{tier}, {verb}",
        work=work_of(tier, verb, SHAPES[shape], 64 * MIB),
        unit=MICROSECONDS if verb in (ONE, MATCH) else GIGABYTES_PER_SECOND,
        ours=Scripted(f"kvwire {tier}"),
        beside=beside,
        target=None,
    )


def drawn() -> dict[str, Figure]:
    memcpy, file = Scripted("memcpy"), Scripted("file", failing="round")
    cases = [
        case(MEMORY, GET, "large", memcpy),
        case(MEMORY, GET, "small", memcpy),
        case(MEMORY, ONE, "large", memcpy),
        case(MEMORY, MATCH, "large", Scripted("dict")),
        case(DISK, GET, "large", memcpy, file),
        case(DISK, ONE, "large", memcpy, file),
    ]
    whole = Benchmark(name="store", cases=cases)
    return draw(whole, take_turns(whole, 1, lambda _: None))


def panels(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.axison]


def named(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_rates_and_times_are_two_pictures() -> None:
    pictures = drawn()
    assert list(pictures) == ["", "-times"]
    assert panels(pictures[""]) == [
        *("memory, 1 MiB a block", "memory, 64 KiB a block", "disk, 1 MiB a block"),
    ]
    assert panels(pictures["-times"]) == [
        *("memory, 1 MiB a block", "memory, 1,000 hashes", "disk, 1 MiB a block"),
    ]
    verbs = [label.get_text() for label in pictures[""].axes[0].get_yticklabels()]
    assert verbs == [GET]


def test_the_legend_names_whoever_was_measured_once() -> None:
    """kvwire is one of them whatever its tier; the file failed."""
    pictures = drawn()
    assert named(pictures[""]) == ["kvwire", "memcpy"]
    assert named(pictures["-times"]) == ["kvwire", "memcpy", "dict"]
    colors = {patch.get_facecolor() for patch in pictures[""].legends[0].get_patches()}
    assert len(colors) == 2
