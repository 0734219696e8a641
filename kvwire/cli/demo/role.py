"""A process of the demo: ``python -m kvwire.cli.demo.role prefill numpy``.

Takes orders on its standard input until that is closed.
"""

from __future__ import annotations

import asyncio
import signal
import sys


def main(name: str, library: str) -> None:
    """Play one of the roles."""
    # Ctrl-C is for the process that started this one. Set before NumPy is imported.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvwire.cli.demo import roles  # noqa: PLC0415

    role = {"prefill": roles.prefill, "decode": roles.decode, "single": roles.single}
    unheard = False
    try:
        asyncio.run(role[name](library))
    except* BrokenPipeError:
        unheard = True  # nobody reads any more what this process says
    sys.exit(unheard)


if __name__ == "__main__":
    main(*sys.argv[1:])
