"""Draws what ``kvwire top`` and ``kvwire trace`` show of two live processes.

``python -m tests.observe.pictures docs/img`` writes top.svg and trace.svg there.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

import kvwire
from kvwire.cli.inspect import screen
from kvwire.observe.inspect import snapshots, sockets, traces
from kvwire.observe.trace import document
from tests.support.tree import ROOT

SPEC: Final = kvwire.KVSpec(
    layers=16, kv_heads=8, head_dim=64, block_tokens=16, dtype="float16"
)
BLOCKS: Final = 64
# What a layer of prefill takes here.
_LAYER_S: Final = 0.01
_REQUESTS: Final = ("req-101", "req-102", "req-103")
# Its prefill goes on and on; nobody publishes the other.
_LONG, _UNKNOWN = "req-104", "req-105"
_INSTANTS: Final = {"marked": ("o", "#b65c00"), "landed": ("|", "#00707a")}


def _cache() -> kvwire.PagedCache:
    tensors = [np.zeros((BLOCKS, 2, 16, 8, 64), np.float16) for _ in range(16)]
    return kvwire.PagedCache(SPEC, tensors)


def _blocks(number: int) -> list[int]:
    return list(range(number * 12, number * 12 + 12))


async def _prefill() -> None:
    cache = _cache()
    async with (
        kvwire.open(name="prefill-0") as comm,
        kvwire.BlockStore.open(["memory:64MiB"]) as store,
    ):
        print((await comm.listen("127.0.0.1:0")).port, flush=True)
        conn = await comm.accept()
        await store.put([b"here"], cache, [0])
        await store.get([b"here", b"away"], cache, [0, 1])
        await asyncio.gather(
            *(_compute(comm, id, cache, n) for n, id in enumerate(_REQUESTS)),
            _compute(comm, _LONG, cache, len(_REQUESTS), 1.0),
            conn.wait_closed(),
        )


async def _compute(
    comm: kvwire.Communicator,
    id: str,
    cache: kvwire.PagedCache,
    number: int,
    layer_s: float = _LAYER_S,
) -> None:
    await _pass(0.1 * number)
    async with comm.publish(id, cache, _blocks(number)) as out:
        for layer in range(SPEC.layers):
            await _pass(layer_s)
            if out.done():
                return
            out.ready(layers=layer)


async def _pass(seconds: float) -> None:
    """Compute for so long, as if it were."""
    await asyncio.to_thread(threading.Event().wait, seconds)


async def draw(folder: Path) -> None:
    """Start the prefill process, pull from it, look at both, and draw what is seen."""
    with tempfile.TemporaryDirectory() as inspect:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.observe.pictures"),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "KVWIRE_INSPECT": inspect},
        )
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        async with kvwire.open(name="decode-0", inspect=inspect) as comm:
            conn = await comm.connect(f"127.0.0.1:{port}")
            cache = _cache()
            before, _ = await asyncio.to_thread(snapshots, sockets(Path(inspect)))
            pulls = [
                conn.pull(id, cache, _blocks(number))
                for number, id in enumerate((*_REQUESTS, _LONG, _UNKNOWN))
            ]
            await asyncio.gather(*pulls[: len(_REQUESTS)])
            found, _ = await asyncio.to_thread(traces, sockets(Path(inspect)))
            await pulls[len(_REQUESTS)].layer(1)
            now, silent = await asyncio.to_thread(snapshots, sockets(Path(inspect)))
            for pull in pulls[len(_REQUESTS) :]:
                pull.abort()
        await process.communicate()
    console = Console(width=118, record=True, file=io.StringIO(), highlight=False)
    console.print(screen(now[::-1], before, silent))
    said = console.export_svg(title="kvwire top")
    # Nothing is fetched by who looks at it.
    (folder / "top.svg").write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", said, flags=re.DOTALL)
    )
    _draw_trace(document(found[::-1]), folder / "trace.svg")


def _draw_trace(trace: dict[str, Any], path: Path) -> None:
    """Draw a file for Perfetto, the ends of a transfer one below the other."""
    rows = trace["traceEvents"]
    names = {
        row["pid"]: row["args"]["name"].partition(",")[0]
        for row in rows
        if row["name"] == "process_name"
    }
    slices = [r for r in rows if r["ph"] == "X" and r["args"]["side"] in _SIDES]
    slices.sort(key=lambda row: (row["args"]["id"], row["pid"]))
    zero_us = min(row["ts"] for row in slices)
    figure = Figure((9, 0.32 * len(slices) + 0.8), layout="constrained")
    axes = figure.add_subplot()
    at: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
    for y, row in enumerate(slices):
        left, width = (row["ts"] - zero_us) / 1000, row["dur"] / 1000
        colour = _SIDES[row["args"]["side"]]
        axes.barh(y, width, 0.7, left, color=colour, edgecolor="#888888", lw=0.6)
        end = row["ts"] + row["dur"]
        at.setdefault((row["pid"], row["tid"]), []).append((row["ts"], end, y))
    for what, (marker, colour) in _INSTANTS.items():
        seen = [r for r in rows if r["ph"] == "i" and r["name"].startswith(what)]
        places = [(r["ts"], _row_of(at, r)) for r in seen]
        axes.plot(
            [(ts - zero_us) / 1000 for ts, _ in places],
            [y for _, y in places],
            marker,
            color=colour,
            ms=3 if marker == "o" else 9,
            label=what,
        )
    arrows: dict[int, list[Any]] = {}
    for row in rows:
        if row["ph"] in ("s", "f"):
            arrows.setdefault(row["id"], []).append(row)
    for ends in arrows.values():
        (x, y), (to_x, to_y) = (
            ((r["ts"] - zero_us) / 1000, _row_of(at, r)) for r in ends
        )
        style = {"arrowstyle": "->", "color": "#8a2be2", "lw": 1.2}
        axes.annotate("", (to_x, to_y), (x, y), arrowprops=style)
    axes.set_yticks(
        range(len(slices)),
        [f"{names[row['pid']]}: {row['name']}" for row in slices],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=7, frameon=False, loc="outside upper right", ncols=2)
    figure.savefig(path)


_SIDES: Final = {"send": "#dce6f4", "receive": "#e2f1e4"}


def _row_of(at: dict[tuple[int, int], list[tuple[float, float, int]]], row: Any) -> int:
    """The line of the slice that an instant or an arrow is on."""
    spans = at.get((row["pid"], row["tid"]), [])
    return next((y for begin, end, y in spans if begin <= row["ts"] <= end), -1)


if __name__ == "__main__":
    asyncio.run(draw(Path(sys.argv[1])) if len(sys.argv) > 1 else _prefill())
