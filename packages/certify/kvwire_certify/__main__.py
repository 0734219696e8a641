"""The processes of a run: ``python -m kvwire_certify left`` and ``right``."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Final

from kvwire.errors import UsageError
from kvwire_certify.player import left_end
from kvwire_certify.processes import MessageSocket, Started, right_end
from kvwire_certify.transport import TARGETS, load

ENDS: Final[dict[str, Callable[..., Coroutine[Any, Any, None]]]] = {
    "left": left_end,
    "right": right_end,
}


def main() -> None:
    """Run one end, according to the command line.

    The process exits without cleaning up, because a transport may have left threads
    that never end.
    """
    role, descriptor, target, *arguments = sys.argv[1:]

    async def run() -> None:
        channel = MessageSocket(socket.socket(fileno=int(descriptor)))
        try:
            load(target)
        except UsageError as exc:
            await channel.send(Started(error="usage", text=str(exc)))
        except ImportError as exc:
            if target.partition(":")[0] not in TARGETS:
                raise
            missing = isinstance(exc, ModuleNotFoundError)
            error = Started(
                error="missing" if missing else "library",
                text=str(exc),
                library=exc.name or "",
            )
            await channel.send(error)
        else:
            await ENDS[role](channel, target, *arguments)

    status = 1
    try:
        asyncio.run(run())
        status = 0
    except BaseException:  # noqa: BLE001 - it is the last line of a process
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
