"""One side of a benchmark as a process of its own."""

from __future__ import annotations

import sys

from kvwire.cli.bench.side import main

main(sys.argv[1:])
