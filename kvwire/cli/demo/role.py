"""A process of the demo: ``python -m kvwire.cli.demo.role prefill --library numpy``.

Takes orders on its standard input until that is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys


def main() -> None:
    """Play one of the roles."""
    # Ctrl-C is for the process that started this one. Set before NumPy is imported.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("prefill", "decode", "single"))
    parser.add_argument("--library", choices=("numpy", "torch"), default="numpy")
    options = parser.parse_args()
    from kvwire.cli.demo import roles  # noqa: PLC0415

    try:
        asyncio.run(getattr(roles, options.role)(options.library))
    except* BrokenPipeError:
        # Nobody reads any more what this process says.
        sys.exit(1)


if __name__ == "__main__":
    main()
