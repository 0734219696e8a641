"""kvwire beside others' software, in one run.

python -m packages.certify.tests.bench NAME
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from cyclopts import App, Parameter

from kvwire.cli.main import main
from kvwire.limits import MIB
from kvwire_certify.bench import command
from kvwire_certify.bench.command import COMMON, TCP, Common, Mebibytes, Shapes, within
from kvwire_certify.bench.turns import Findings
from packages.certify.tests.bench import counting, iperf3
from packages.certify.tests.bench.peer import (
    ALL_PEERS,
    INSTALL,
    NIXL,
    interpreters,
    joined,
)

Pythons = Annotated[
    tuple[Path, ...],
    Parameter(consume_multiple=True, negative_iterable=(), env_var="BENCH_PEER_PYTHON"),
]
Rounds = Annotated[int, within(1, 10_000)]
Output = Annotated[Path | None, Parameter(allow_leading_hyphen=True)]

app = App(name="python -m packages.certify.tests.bench", help=__doc__)
# Codecs are measured with the demo's KV.
sys.path.append(str(Path(__file__).parents[4] / "examples"))
_SHAPES = Shapes()


@app.command
def fragments(
    *,
    peers: str = "all",
    peer_python: Pythons = (),
    shapes: Annotated[Shapes, Parameter(name="*")] = _SHAPES,
    common: Common = COMMON,
) -> int:
    """``kvwire bench fragments`` beside NIXL and iperf3.

    Args:
        peers: Of nixl and iperf3, separated by commas; or all, or none. One that is
            not installed is named with how to install it.
        peer_python: Interpreters in which NIXL is looked for, before this one.
        shapes: What is moved.
        common: Options that every benchmark has.
    """
    names = {"all": ALL_PEERS, "none": ()}.get(peers, tuple(peers.split(",")))
    plan = joined(shapes.benchmark(common), names, interpreters(peer_python), TCP)
    return _status(command.measure(plan, common, **asdict(shapes)))


@app.command
def ops(
    *, transport: str = "tcp", peer_python: Pythons = (), common: Common = COMMON
) -> int:
    """``kvwire bench ops`` with NIXL beside its transfers, over TCP or shared memory.

    Args:
        transport: The transport of kvwire; beside ``local`` NIXL has shared memory.
        peer_python: Interpreters in which NIXL is looked for, before this one.
        common: Options that every benchmark has.
    """
    wire = command.SAME_HOST if transport == "local" else TCP
    plan = command.ops_of(transport, common.loop)
    plan = joined(plan, ["nixl"], interpreters(peer_python), wire)
    return _status(command.measure(plan, common, transport=transport))


@app.command
def messages(
    *, transport: str = "tcp", round_mib: Mebibytes = 256, common: Common = COMMON
) -> int:
    """``kvwire bench messages`` with iperf3 beside its rates."""
    plan = command.messages_of(transport, common.loop, round_mib * MIB)
    plan = joined(plan, [iperf3.NAME], [], TCP)
    return _status(command.measure(plan, common, transport=transport))


def _status(found: Findings) -> int:
    return int(any(one.name in row.failures for row in found for one in row.case.ours))


@app.command
def store(
    *,
    tiers: str = "all",
    transport: str = "tcp,local",
    directory: Path | None = None,
    blocks: Literal["large", "small", "both"] = "both",
    round_mib: Annotated[int, within(4, 4096)] = 64,
    common: Common = COMMON,
) -> int:
    """Blocks into each tier of a store and out, beside copies, files, objects, redis.

    Each tier is full, and the blocks to get are in no tier above it. With all tiers and
    --round-mib 64, this takes about 8 GiB of memory, and as much of the disk.

    Args:
        tiers: Some of memory, disk, server and object, separated by commas; or all. The
            object tier needs the extra `store`, and uses a directory.
        transport: The transports to the store server, separated by commas.
        directory: Where the disk and object tiers write; by default that of temporary
            files.
        blocks: large: 1 MiB, with 64 KiB per token in 32 layers; small: 64 KiB, with 4
            KiB per token in 16 layers.
        round_mib: MiB of one put or get.
        common: Options that every benchmark has.
    """
    from packages.certify.tests.bench import store_cases
    from packages.certify.tests.bench.store import SHAPES, TIERS

    names: Sequence[str] = list(TIERS) if tiers == "all" else tiers.split(",")
    shapes = list(SHAPES) if blocks == "both" else [blocks]
    with TemporaryDirectory(prefix="kvwire-bench-", dir=directory) as place:
        plan = store_cases.benchmark(
            names, transport.split(","), shapes, Path(place), round_mib * MIB
        )
        settings = {"tiers": names, "blocks": shapes, "round_mib": round_mib}
        return _status(command.measure(plan, common, **settings))


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
    for name, work in command.operations().items():
        if only in name:
            found = asyncio.run(counting.count(work, transport, memory))
            print(f"{name}: {found}", *found.functions[:top], sep="\n  ")


@app.command
def codecs(*, rounds: Rounds = 5) -> None:
    """What the codec of KV blocks saves and costs, beside a memcpy.

    The KV is that of the demo's model, which knows its book by heart; and numbers of a
    normal distribution.

    Args:
        rounds: The number of rounds; more rounds give firmer medians.
    """
    from packages.certify.tests.bench import codecs as coding

    for images in coding.SETS:
        print(f"{images}: {coding.measure(images, rounds)}")


@app.command
def sessions(
    *, tokens: Annotated[int, within(64, 16_000)] = 8000, rounds: Rounds = 5
) -> None:
    """What sessions of llama.cpp cost that go on at another server, and their front.

    `make test-llamacpp` installs the server.

    Args:
        tokens: Tokens of a session.
        rounds: How many sessions; ten times as many short requests, and streams.
    """
    from packages.certify.tests.bench import sessions as costs_of

    load = os.getloadavg()[0]
    found = asyncio.run(costs_of.measure(tokens, rounds, 10 * rounds))
    print(f"load {load:.1f} at the beginning; medians")
    print(costs_of.shown(found))


@app.command
def prefills(
    *, prompts: Annotated[int, within(1, 100_000)] = 500, seed: int = 0
) -> None:
    """Whether transformers decodes what vLLM has prefilled as it does alone.

    `make test-vllm` installs both.

    Args:
        prompts: Prompts of 10 to 2,000 tokens, each with 64 greedy tokens.
        seed: The seed of the prompts.
    """
    from packages.certify.tests.bench import prefills as pairs

    print(pairs.shown(pairs.measure(prompts, seed, print)))


@app.command
def install() -> None:
    """How to install the peers."""
    print(f"{NIXL}: {INSTALL}")
    print(f"iperf3: {iperf3.INSTALL}")


if __name__ == "__main__":
    sys.exit(main(command=app))
