"""``kvwire store replay``: a trace of block accesses through tiers, in virtual time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

import msgspec
from rich.progress import Progress
from rich.table import Table

from kvwire import UsageError
from kvwire.cli.console import console, show
from kvwire.extras import install_command
from kvwire.store.replay import Replay, ReplayReport
from kvwire.store.trace import read_trace
from kvwire.types import in_bytes, read_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES: Final = (".svg", ".png", ".pdf")
_TICKS_PER_S: Final = {"ms": 1000.0, "s": 1.0}
_PROGRESS_S: Final = 0.25
_COLOURS: Final = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")


def replay(
    trace: Path,
    /,
    *,
    tier: list[str],
    block: str = "",
    write: Literal["through", "back"] = "through",
    tenant: list[str] | None = None,
    unit: Literal["ms", "s"] = "ms",
    plot: Path | None = None,
    json: bool = False,
) -> None:
    """Replay a trace of block hashes through tiers, in virtual time.

    No block is copied and no directory is touched. The store's own code decides which
    blocks are kept, evicted or brought back.

    Args:
        trace: A file with one JSON object per request and line, with the fields
            timestamp, input_length, output_length and hash_ids: one of Mooncake's
            published traces, or one that a store recorded.
        tier: A tier, fastest first: --tier memory:8GiB --tier 'disk:nvme?size=100GiB'.
        block: The size of a block, such as 2MiB, if the trace does not give it.
        write: When a put is complete, as for `serve`.
        tenant: A tenant's name and quotas, as for `serve`, if the trace has tenants.
        unit: The unit of the trace's timestamps.
        plot: Draw hits, memory use and evictions over time into this file: .svg, .png
            or .pdf.
        json: Print JSON instead.
    """
    if plot is not None:
        _check_plot(plot)
    replayed = Replay(
        tier,
        write=write,
        tenants=tenant or (),
        block_bytes=_block_bytes(block) if block else 0,
        ticks_per_s=_TICKS_PER_S[unit],
    )
    with trace.open("rb") as stream:
        asyncio.run(_play(replayed, trace, stream))
    report = replayed.report()
    if plot is not None:
        _draw(report, plot)
    if json:
        document = msgspec.json.encode(report)
        sys.stdout.buffer.write(msgspec.json.format(document) + b"\n")
        return
    _show(report)


async def _play(replayed: Replay, trace: Path, stream: BinaryIO) -> None:
    with _progress(trace, stream, replayed) as progress:
        shown = monotonic()
        for line in read_trace(trace, stream):
            await replayed.play(line)
            if progress is not None and monotonic() - shown > _PROGRESS_S:
                shown = monotonic()
                progress()


@contextmanager
def _progress(
    trace: Path, stream: BinaryIO, replayed: Replay
) -> Iterator[Callable[[], None] | None]:
    """Show a bar on a terminal with the share of the file that was read."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    with Progress(console=screen, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=trace.stat().st_size)

        def progress() -> None:
            text = f"{replayed.accesses:,} blocks"
            bar.update(task, completed=stream.tell(), description=text)
            bar.refresh()

        yield progress


def _block_bytes(text: str) -> int:
    try:
        return read_bytes(text)
    except UsageError as exc:
        raise UsageError(f"--block {exc}") from None


def _show(report: ReplayReport) -> None:
    screen = console()
    screen.print(
        f"{report.lines:,} lines with {report.accesses:,} blocks, in "
        f"{report.span_s:,.1f} s of the trace"
    )
    screen.print(
        f"hit rate {report.hit_rate:.2%}: {report.hit_blocks:,} of "
        f"{report.asked_blocks:,} requested blocks"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("tier")
    columns = ("hits", "share", "read", "written", "evicted", "blocks", "used", "of")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for tier in report.tiers:
        table.add_row(
            tier.name,
            f"{tier.hit_blocks:,}",
            f"{tier.hit_blocks / max(1, report.asked_blocks):.2%}",
            in_bytes(tier.read_bytes),
            in_bytes(tier.written_bytes),
            f"{tier.evicted_blocks:,}",
            f"{tier.blocks:,}",
            in_bytes(tier.used_bytes),
            in_bytes(tier.size_bytes),
        )
    show(table, screen)


# --- the picture ----------------------------------------------------------------------


def _check_plot(path: Path) -> None:
    """Check before the replay that the picture can be drawn after it."""
    if find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib: {install_command('plot')}")
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end in {', '.join(_SUFFIXES)}")


def _draw(report: ReplayReport, path: Path) -> None:
    """Draw hit rates, bytes in use and evictions over the time of the trace."""
    from matplotlib import rc_context  # noqa: PLC0415 - it may be missing
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9.6, 7.2), layout="constrained")
    rates, used, evicted = figure.subplots(3, sharex=True)
    names = [tier.name for tier in report.tiers]
    # Each value is drawn up to the end of its interval, so the first one comes twice.
    points = report.timeline[:1] + report.timeline
    times = [0.0, *(point.time_s for point in report.timeline)][: len(points)]
    colours = [_COLOURS[at % len(_COLOURS)] for at in range(len(names))]
    shares = [
        [100 * p.hit_blocks[at] / max(1, p.asked_blocks) for p in points]
        for at in range(len(names))
    ]
    rates.stackplot(times, shares, step="pre", labels=names, colors=colours, alpha=0.8)
    rates.axhline(
        100 * report.hit_rate, color="#444", linewidth=1, linestyle="--", label="all"
    )
    rates.set_ylim(0, 100)
    for at, name in enumerate(names):
        size_gib = report.tiers[at].size_bytes / 2**30
        full = [p.used_bytes[at] / 2**30 for p in points]
        used.step(times, full, where="pre", color=colours[at], label=name)
        used.axhline(size_gib, color=colours[at], linewidth=0.8, linestyle=":")
        gone = [p.evicted_blocks[at] / report.part_s for p in points]
        evicted.step(times, gone, where="pre", color=colours[at], label=name)
    _label(rates, f"hits, % of requested blocks ({report.hit_rate:.1%} in all)")
    _label(used, "GiB in use; dotted: the tier's size")
    _label(evicted, "blocks evicted in a second")
    rates.legend(loc="upper right", fontsize="small", framealpha=0.8)
    evicted.set_xlabel("seconds of the trace")
    evicted.set_xlim(0, max(times, default=1.0))
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvwire"}):
            figure.savefig(path, metadata=metadata, dpi=120)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from None


def _label(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
