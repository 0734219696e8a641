"""One half of a pair as a process: reads calls, answers them, ends with its input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvwire.cli.bench.fragment_work import ARENA
from kvwire.cli.bench.sides.fragments_half import FragmentsHalf
from kvwire.cli.bench.sides.half import CALLS, Half
from kvwire.cli.bench.sides.kvwire_half import KvwireHalf
from kvwire.cli.bench.sides.many_half import ManyHalf
from kvwire.cli.bench.sides.ops_half import OpsHalf
from kvwire.cli.bench.sides.overlap_half import OverlapHalf
from kvwire.cli.bench.sides.setup_half import SetupHalf, StreamsSetupHalf
from kvwire.cli.bench.sides.sockets_half import SocketsHalf
from kvwire.cli.bench.sides.solo import SOLO_CALLS, InprocSolo, MemcpySolo, Solo
from kvwire.cli.bench.sides.store_server import SERVER_CALLS, StoreServerSide
from kvwire.cli.bench.sides.store_solo import StoreSolo
from kvwire.cli.bench.sides.streams_half import StreamsHalf

Role: TypeAlias = Half | Solo | StoreServerSide

Roles: TypeAlias = Mapping[str, Callable[[dict[str, str]], Role]]

HALVES: Final[Roles] = {
    "kvwire": lambda options: KvwireHalf(options["transport"]),
    "fragments": lambda options: FragmentsHalf(
        options["transport"],
        int(options["pool_bytes"]),
        arena=options.get("memory") == ARENA,
    ),
    "overlap": lambda options: OverlapHalf(options["transport"]),
    "inproc": lambda options: InprocSolo(
        options["transport"], int(options["pool_bytes"])
    ),
    "many": lambda options: ManyHalf(options["transport"], int(options["endpoints"])),
    "memcpy": lambda options: MemcpySolo(int(options["pool_bytes"])),
    "ops": lambda options: OpsHalf(options["transport"]),
    "setup": lambda options: SetupHalf(options["transport"]),
    "setup-streams": lambda _: StreamsSetupHalf(),
    "store": lambda options: StoreSolo(options["tier"], options.get("place", "")),
    "store-server": lambda _: StoreServerSide(),
    "streams": lambda _: StreamsHalf(),
    "sockets": lambda _: SocketsHalf(),
}


async def answer(half: Role, line: bytes) -> dict[str, Any]:
    """Do what one line says; an exception becomes an answer too."""
    asked = json.loads(line)
    name, arguments = asked["call"], asked["arguments"]
    try:
        if name not in _calls(half):
            raise ValueError(f"there is no call {name!r}")
        if "work" in arguments:
            arguments["work"] = half.work_type(**arguments["work"])
        found: dict[str, Any] = await getattr(half, name)(**arguments)
    except Exception as exc:  # noqa: BLE001 - it is reported by the other process
        return {"error": f"{name}: {type(exc).__name__}: {exc}"}
    return found


def _calls(half: Role) -> frozenset[str]:
    if isinstance(half, StoreServerSide):
        return SERVER_CALLS
    return SOLO_CALLS if isinstance(half, Solo) else CALLS


async def obey(half: Role) -> None:
    """Answer line after line until there are no more."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while line := await reader.readline():
            said = json.dumps(await answer(half, line)) + "\n"
            # Without a buffer: whoever was interrupted does not read it any more.
            with contextlib.suppress(BrokenPipeError):
                os.write(sys.stdout.fileno(), said.encode())
    finally:
        await half.close()


def main(arguments: Sequence[str], halves: Roles = HALVES) -> None:
    """Play a role: ``python -m kvwire.cli.bench.sides ROLE [KEY=VALUE ...]``."""
    # Ctrl-C reaches every process of a terminal; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role, *pairs = arguments
    options = dict(pair.split("=", 1) for pair in pairs)
    half = halves[role](options)
    if options.get("loop") == "uvloop":
        import uvloop  # noqa: PLC0415 - not on every platform

        uvloop.run(obey(half))
    else:
        asyncio.run(obey(half))


if __name__ == "__main__":
    main(sys.argv[1:])
