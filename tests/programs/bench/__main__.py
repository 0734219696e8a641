"""``python -m tests.programs.bench``: kvwire beside others' software, in one run."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from kvwire.cli.bench import fragments as ours
from kvwire.cli.bench import ops, report
from kvwire.cli.bench import store as stores
from kvwire.cli.main import main
from kvwire.limits import MIB
from tests.programs.bench import cost as costs
from tests.programs.bench import counts as counting
from tests.programs.bench import iperf3, store
from tests.programs.bench.fragments import ALL_PEERS, Beside, beside_transfers, joining
from tests.programs.bench.peer import PEERS, interpreters

Pythons = Annotated[
    tuple[Path, ...],
    Parameter(consume_multiple=True, negative_iterable=(), env_var="BENCH_PEER_PYTHON"),
]

app = App(name="python -m tests.programs.bench", help=__doc__)
# Codecs are measured with the demo's KV.
sys.path.append(str(Path(__file__).parents[3] / "examples"))


def _beside(run: Callable[..., int], join: Beside) -> Callable[..., int]:
    """A command of kvwire with others who stand beside it."""

    @functools.wraps(run)
    def command(*, common: report.Common = report.COMMON, **options: Any) -> int:
        return run(**options, common=replace(common, beside=join))

    return command


app.command(_beside(ops.messages, iperf3.beside), name="messages")
app.command(_beside(stores.command, store.beside), name="store")


@app.command
def fragments(
    *,
    transport: str = "all",
    peers: str = "all",
    peer_python: Pythons = (),
    sizes_kib: ours.Kibibytes = ours.SIZES_KIB,
    verb: Literal["push", "pull", "get", "all"] = "all",
    layout: Literal["per-layer", "cross-layer", "both"] = "both",
    rounds: report.Rounds = 5,
    round_mib: report.Mebibytes = 64,
    common: report.Common = report.COMMON,
) -> int:
    """``kvwire bench fragments`` beside other libraries; see there for its options.

    Args:
        transport: Transports, separated by commas, or all that are installed.
        peers: Of nixl, mooncake, ucxx and iperf3, separated by commas; or all, or none.
            One that is not installed is named with how to install it.
        peer_python: Interpreters in which the peers are looked for, before this one.
        sizes_kib: Sizes of one layer of one block.
        verb: How they move: pushed, pulled, or got from a window.
        layout: A tensor for each layer, or blocks across layers.
        round_mib: MiB that each moves in a round.
        rounds: The number of rounds.
        common: Options that every benchmark has.
    """
    names = {"all": ALL_PEERS, "none": ()}.get(peers, tuple(peers.split(",")))
    return ours.command(
        transport=transport,
        sizes_kib=sizes_kib,
        verb=verb,
        layout=layout,
        round_mib=round_mib,
        rounds=rounds,
        common=replace(common, beside=joining(names, interpreters(peer_python))),
    )


@app.command(name="ops")
def operations(
    *,
    transport: str = "tcp",
    peer_python: Pythons = (),
    rounds: report.Rounds = 5,
    common: report.Common = report.COMMON,
) -> int:
    """``kvwire bench ops`` with NIXL beside its transfers, over TCP or shared memory.

    Args:
        transport: The transport of kvwire; beside ``local`` NIXL has shared memory.
        peer_python: Interpreters in which NIXL is looked for, before this one.
        rounds: How often everything is measured.
        common: Options that every benchmark has.
    """
    join = beside_transfers(transport, interpreters(peer_python))
    return ops.ops(
        transport=transport, rounds=rounds, common=replace(common, beside=join)
    )


@app.command
def cost(
    *,
    transport: str = "tcp",
    rounds: report.Rounds = 3,
    round_mib: report.Mebibytes = 64,
    json: report.Output = None,
) -> int:
    """Memory of connections and transfers, CPU of both sides, stalls of the loop.

    Args:
        transport: Transports that join two processes, separated by commas.
        rounds: How often everything is measured, in new processes each time.
        round_mib: MiB of a transfer; it goes in fragments of 4 KiB.
        json: Write every answer, and what ran where, to this file; - is the output.

    Returns:
        1 if a transport failed.
    """
    transports = transport.split(",")
    settings = {"transport": transports, "rounds": rounds, "round_mib": round_mib}
    with report.progress_bar(costs.steps(transports, rounds)) as progress:
        found = costs.cost(transports, round_mib * MIB, rounds, progress)
    report.show(costs.render(found), lambda: costs.document(found, settings), json=json)
    return int(any(result.failure for result in found))


@app.command
def counts(
    *, transport: str = "tcp", memory: str = "", only: str = "", top: int = 0
) -> None:
    """What operations consist of: calls of Python, system calls and frames.

    Args:
        transport: Of kvwire.
        memory: "arena" for caches that the other side can map.
        only: Operations with this in their name.
        top: Functions of each to show, those first that take the most time themselves.
    """
    for name, work in counting.works().items():
        if only in name:
            found = asyncio.run(counting.count(work, transport, memory))
            print(f"{name}: {found}", *found.functions[:top], sep="\n  ")


app.command(
    "tests.programs.bench.codecs:command",
    name="codecs",
    help="What codecs of KV blocks save, cost and lose.",
)


@app.command
def install() -> None:
    """How to install the peers."""
    for peer in PEERS.values():
        print(f"{peer.name}: {peer.install}")
    print(f"iperf3: {iperf3.INSTALL}")


if __name__ == "__main__":
    sys.exit(main(command=app))
