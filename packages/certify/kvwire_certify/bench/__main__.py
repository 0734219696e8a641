"""One side of a contender as a process of its own."""

from kvwire_certify.bench.line import main

main()
