"""Two hosts that move blocks, and check each byte: a program for each.

    python -m tests.rdma.mover serve --count 20
    python -m tests.rdma.mover pull --count 20

Each block names its transfer and its place. Before a pull the memory is filled with
another value, and after `drained` again, so that a late write is found at the next use;
the owner's memory too, so that a late read shows in what the reader has. Each prints a
line of JSON for each transfer, and `pull` one for all as well; it ends with status 1 if
any byte was wrong. `--over` names the transport, and with `--require` nothing else may
carry the data. `--fragments` are the sizes of the pieces of memory: each transfer has
the next one. With `--hold` the reader says when it has the first half of the layers,
and the owner waits for SIGUSR1 with the second; with `--give-up` as well, the reader
aborts in the middle of that. Variables KVWIRE_... choose another trust than a key, and
a directory, in which the reader then looks for the role `owner`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvwire
from tests.rdma.hosts import FIRST

PORT: Final = 7400
LAYERS: Final = 4
HALF: Final = LAYERS // 2
CANARY: Final = 0x7B7B7B7B
# A guest is slow, and a loaded machine makes it slower.
DEADLINE_S: Final = 120.0
# Both ends are on a wire that belongs to the test alone.
KEY_FILE: Final = "/run/rdma.key"
KEY: Final = "5b" * 32

Words = npt.NDArray[Any]
Memory = tuple[kvwire.PagedCache, Words]


def _memories(options: argparse.Namespace) -> list[list[Memory]]:
    """What each of those at once has: a cache for each size of fragments.

    Its transfers take them in turn.
    """
    return [
        [_cache(options.mib, kib) for kib in options.fragments]
        for _ in range(options.at_once)
    ]


def _cache(mib: int, fragment_kib: int) -> Memory:
    """A cache, and its memory as words by layer and block."""
    spec = kvwire.KVSpec(
        layers=LAYERS,
        kv_heads=8,
        head_dim=64,
        block_tokens=fragment_kib // 4,
        dtype="float32",
    )
    blocks = max(1, mib * 1024 // (fragment_kib * LAYERS))
    words = np.full((LAYERS, blocks, 2, spec.block_tokens, 8, 64), CANARY, np.uint32)
    tensors = [layer.view(np.float32) for layer in words]
    return kvwire.PagedCache(spec, tensors, layout="NHD"), words.reshape(
        LAYERS, blocks, -1
    )


def _expected(number: int, words: Words) -> Words:
    """What a transfer moves: each word names the transfer, and its place."""
    layers, blocks, length = words.shape
    place = np.arange(layers * blocks, dtype=np.uint32)
    piece = (place + np.uint32(number << 14)) * np.uint32(0x9E3779B1)
    found: Words = piece[:, None] + np.arange(length, dtype=np.uint32)
    return found.reshape(words.shape)


def config(options: argparse.Namespace) -> kvwire.Config:
    """Return the configuration of either end."""
    with open(
        KEY_FILE, "w", opener=lambda path, flags: os.open(path, flags, 0o600)
    ) as f:
        f.write(KEY)
    trust: dict[str, Any] = {"trust": "psk", "psk_file": KEY_FILE}
    return kvwire.Config.load(
        **({} if "KVWIRE_TRUST" in os.environ else trust),
        require=(options.over,) if options.require else (),
        prefer=(options.over,),
        handshake_timeout_s=60.0,
        ping_interval_s=5.0,
        lease_s=options.deadline,
        one_sided_windows="peers",
    )


def _numbers(options: argparse.Namespace, first: int) -> range:
    """The transfers of one of those at once."""
    start: int = options.start
    return range(start + first, start + options.count, options.at_once)


def _written(memory: list[Memory]) -> int:
    """How many words are no longer as they were after the last use."""
    return sum(int((words != CANARY).sum()) for _, words in memory)


def _print(number: int, outcome: kvwire.Outcome, **more: object) -> None:
    line = {
        "transfer": number,
        "state": outcome.state,
        "why": next(iter(outcome.missing.values()), ""),
        **more,
    }
    print(json.dumps(line), flush=True)


async def serve(options: argparse.Namespace) -> int:
    """Publish one transfer after the other, from memory filled anew for each."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    go_on = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, go_on.set)
    async with kvwire.open(config(options), name="owner") as comm:

        async def publish(first: int, memory: list[Memory]) -> None:
            for number in _numbers(options, first):
                cache, words = memory[number % len(memory)]
                words[:] = _expected(number, words)
                ids = range(words.shape[1])
                out = comm.publish(str(number), cache, ids, deadline=options.deadline)
                out.ready(layers=slice(0, HALF))
                if options.hold:
                    await go_on.wait()
                    go_on.clear()
                out.ready(layers=slice(HALF, LAYERS))
                out.finish()
                outcome = await out
                await out.drained()
                words[:] = CANARY
                _print(number, outcome)

        await comm.listen(f"{options.at}:{PORT}")
        if comm.config.directory:
            comm.announce(role="owner")
        print("listening", flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as group:
                for first, memory in enumerate(_memories(options)):
                    group.create_task(publish(first, memory))
                await asyncio.Event().wait()
    print("closed", flush=True)
    return 0


async def pull(options: argparse.Namespace) -> int:
    """Pull them, and compare each word."""
    found: Counter[str] = Counter(wrong=0, late=0, bytes=0)
    began = time.monotonic()
    memories = _memories(options)
    async with kvwire.open(config(options), name="reader") as comm:
        peer = comm.peer(
            "role=owner" if comm.config.directory else f"{options.at}:{PORT}"
        )

        async def each(first: int, memory: list[Memory]) -> None:
            for number in _numbers(options, first):
                state = await _pulled(number, memory, peer, options, found)
                if options.once_lost and state != "complete":
                    break

        async with asyncio.TaskGroup() as group:
            for first, memory in enumerate(memories):
                group.create_task(each(first, memory))
    for memory in memories:  # the communicator is closed
        found["late"] += _written(memory)
    seconds = round(time.monotonic() - began, 2)
    print("summary " + json.dumps({**found, "seconds": seconds}), flush=True)
    return 1 if found["wrong"] or found["late"] else 0


async def _pulled(
    number: int,
    memory: list[Memory],
    peer: kvwire.Peer,
    options: argparse.Namespace,
    found: Counter[str],
) -> str:
    """Pull one, and count what its memory holds; returns the state of its outcome."""
    cache, words = memory[number % len(memory)]
    ids = range(words.shape[1])
    incoming = peer.pull(str(number), cache, ids, deadline=options.deadline)
    if options.hold:
        with contextlib.suppress(kvwire.RequestError):  # the outcome has it
            await incoming.layer(HALF - 1)
            print(f"half of {number}", flush=True)
            if options.give_up:
                await incoming.layer(HALF)  # and the next one is on its way
                incoming.abort("it gave up")
    outcome = await incoming
    landed = outcome.landed.ids()
    differs = words[:, landed] != _expected(number, words)[:, landed]
    wrong = int(differs.any(axis=-1).sum())
    found["wrong"] += wrong
    found["bytes"] += words[:, landed].nbytes
    found[outcome.state] += 1
    await incoming.drained()
    words[:] = CANARY
    way = str(peer.connection.transport_report) if peer.connection else ""
    found["transfers"] += 1
    counts = {"landed": len(landed), "wrong": wrong, "after": found["transfers"]}
    _print(number, outcome, **counts, way=way)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(options.watch):
            await asyncio.Event().wait()  # nothing may happen meanwhile
    found["late"] += _written(memory)
    return outcome.state


def main() -> int:
    """Be one of the two ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["serve", "pull"])
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="the first one's number")
    parser.add_argument("--at-once", type=int, default=1, help="transfers")
    parser.add_argument("--mib", type=int, default=4, help="of each transfer")
    # 64 KiB: read where they lie, rather than packed.
    parser.add_argument("--fragments", type=int, nargs="+", default=[64], help="KiB")
    parser.add_argument("--over", default="ucx", help="the transport")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S)
    parser.add_argument("--watch", type=float, default=0.0, help="s after each one")
    parser.add_argument("--at", default=FIRST, help="the owner's address")
    parser.add_argument("--require", action="store_true")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument(
        "--once-lost", action="store_true", help="end with the first that is incomplete"
    )
    parser.add_argument("--give-up", action="store_true")
    options = parser.parse_args()
    return asyncio.run((serve if options.role == "serve" else pull)(options))


if __name__ == "__main__":
    sys.exit(main())
