"""One side of a contender as a process of its own."""

from kvwire.cli.bench.line import main

main()
