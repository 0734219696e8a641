"""The ``kvwire bench store`` command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from kvwire import UsageError
from kvwire.cli.bench.case import Others
from kvwire.cli.bench.filesystem import filesystem
from kvwire.cli.bench.output import Output, Rounds, run
from kvwire.cli.bench.store import StoreChoice, store
from kvwire.cli.bench.store_plot import draw
from kvwire.cli.bench.store_report import render
from kvwire.cli.bench.store_work import SHAPES, TIERS
from kvwire.cli.plot import Plot
from kvwire.limits import MIB

Mebibytes = Annotated[int, Parameter(validator=Number(gte=4, lte=4096))]

QUICK_ROUNDS = 2
QUICK_MIB = 8


def nobody(choice: StoreChoice) -> Others:
    """Return nobody who stands beside kvwire."""
    del choice
    return Others()


def command(  # noqa: PLR0913 - each is an option
    *,
    tiers: str = "all",
    transport: str = "tcp,local",
    directory: Path | None = None,
    blocks: Literal["large", "small", "both"] = "both",
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    rounds: Rounds = 5,
    round_mib: Mebibytes = 64,
    quick: bool = False,
    json: Output = None,
    plot: Plot = None,
    beside: Annotated[Callable[[StoreChoice], Others], Parameter(parse=False)] = nobody,
) -> None:
    """Blocks into each tier of a store, and out of it: put, get, one block, match.

    Each tier is in its steady state: it is full, and what is got is in no
    tier above it. With all tiers and --round-mib 64 it takes some 8 GiB of memory.

    Args:
        tiers: Of memory, disk, server and object, separated by commas; or all. The
            last needs obstore, the extra store, and uses a directory.
        transport: To the server, of kvwire, separated by commas.
        directory: Where the disk and object tiers write, in a directory that is
            removed at the end; by default one for temporary files. The disk is used
            with --round-mib times 14, objects with twice that for every round.
        blocks: large: 1 MiB, 64 KiB a token in 32 layers; small: 64 KiB, 4 KiB a
            token in 16 layers.
        loop: The event loop of kvwire.
        rounds: How often everybody does their work; more rounds, firmer medians.
        round_mib: MiB of one put or get.
        quick: 2 rounds of 8 MiB, to see that it runs; such figures mean little.
        json: Write every sample, and what ran where, to this file; - is the output.
        plot: Write a picture of the rates to this file, .svg, .png or .pdf, and one of
            the times beside it: found.svg and found-times.svg. Needs matplotlib.
        beside: Returns who stands beside kvwire; no option of the command.
    """
    if quick:
        rounds, round_mib = QUICK_ROUNDS, QUICK_MIB
    with _within(directory) as place:
        choice = StoreChoice(
            tiers=TIERS if tiers == "all" else tiers.split(","),
            transports=transport.split(","),
            shapes=list(SHAPES) if blocks == "both" else [blocks],
            directory=place,
            round_bytes=round_mib * MIB,
            loop=loop,
        )
        benchmark = store(choice, beside(choice))
        settings: dict[str, Any] = {
            "tiers": list(choice.tiers),
            "transport": list(choice.transports),
            "filesystem": filesystem(place),
            "blocks": choice.shapes,
            "loop": loop,
            "rounds": rounds,
            "round_mib": round_mib,
        }
        run(benchmark, settings, json=json, plot=plot, render=render, draw=draw)


@contextmanager
def _within(directory: Path | None) -> Iterator[Path]:
    """A new directory in this one, removed at the end.

    Raises:
        UsageError: It is none, or cannot be written to.
    """
    if directory is not None and not directory.is_dir():
        raise UsageError(f"--directory {directory}: there is no such directory")
    try:
        made = TemporaryDirectory(prefix="kvwire-bench-", dir=directory)
    except OSError as exc:
        raise UsageError(f"--directory {directory}: {exc.strerror}") from None
    with made as name:
        yield Path(name)
